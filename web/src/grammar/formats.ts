/** The string formats that are enforced, as patterns; other formats are annotations. */

const DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])";
const TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
const BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const HEX = "[0-9A-Fa-f]";

/** Sources: RFC 3339, 5321, 1123, 2673, 4291, 9562, 3986; IPv6 without "::". */
export const FORMATS: Readonly<Record<string, string>> = {
  "date-time": `${DATE}T${TIME}`,
  time: TIME,
  date: DATE,
  duration: "P([0-9]{1,9}W|([0-9]{1,9}D)(T[0-9]{1,9}[HMS])?|T[0-9]{1,9}[HMS])",
  email: `[A-Za-z0-9!#$%&'*+/=?^_\`{|}~-]{1,32}(\\.[A-Za-z0-9_+-]{1,32}){0,3}@${LABEL}(\\.${LABEL}){1,3}`,
  hostname: `${LABEL}(\\.${LABEL}){0,5}`,
  ipv4: `${BYTE}(\\.${BYTE}){3}`,
  ipv6: `${HEX}{1,4}(:${HEX}{1,4}){7}`,
  uuid: `${HEX}{8}-${HEX}{4}-${HEX}{4}-${HEX}{4}-${HEX}{12}`,
  uri: "[A-Za-z][A-Za-z0-9+.-]{0,15}:[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]{1,2000}",
};
