/**
 * Reads JSON without the losses of JSON.parse: all digits of long numbers, 1.0 as distinct from 1, and the order of
 * names that look like numbers. Templates write the calls of earlier answers from it.
 */

/** A JSON value: integers are bigints, floats are numbers, and objects are maps. */
export type ExactValue = null | boolean | bigint | number | string | readonly ExactValue[] | ExactMap;
export type ExactMap = ReadonlyMap<string, ExactValue>;

/** Marks an exact JSON value among ordinary JavaScript values. */
export class Exact {
  constructor(readonly value: ExactValue) {}
}

const TOKEN = /[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*"|-?\d[\d.eE+-]*|[a-z]+|[[\]{}:,])/gy;
const WORDS: Readonly<Record<string, ExactValue>> = { true: true, false: false, null: null };

/** Parses a JSON text. Throws SyntaxError where JSON.parse does. */
export function readExact(text: string): Exact {
  JSON.parse(text);
  // JSON.parse has accepted the text, so the first character of a token says what the token is.
  const tokens = [...text.matchAll(TOKEN)].map(([, token = ""]) => token);
  let at = 0;
  const read = (): ExactValue => {
    const token = tokens[at++] ?? "";
    if (token === "[") {
      const made: ExactValue[] = [];
      while (tokens[at] !== "]") {
        made.push(read());
        if (tokens[at] === ",") at++;
      }
      at++;
      return made;
    }
    if (token === "{") {
      const made = new Map<string, ExactValue>();
      while (tokens[at] !== "}") {
        const name = JSON.parse(tokens[at] ?? "") as string;
        at += 2;
        made.set(name, read());
        if (tokens[at] === ",") at++;
      }
      at++;
      return made;
    }
    if (token.startsWith('"')) return JSON.parse(token) as string;
    return WORDS[token] ?? (isWhole(token) ? BigInt(token) : token in WORDS ? null : Number(token));
  };
  return new Exact(read());
}

/** Whether a JSON number has neither a point nor an exponent, and so is an int in Python. */
export function isWhole(text: string): boolean {
  return /^-?\d+$/.test(text);
}

/** Writes JSON as Python's json.dumps does, because models are trained on such text. */
export function writeExact(value: ExactValue): string {
  if (typeof value === "bigint") return String(value);
  if (typeof value === "number")
    return Number.isFinite(value) ? floatText(value) : value > 0 ? "Infinity" : "-Infinity";
  if (value instanceof Map) {
    const members = [...value].map(([name, one]) => `${JSON.stringify(name)}: ${writeExact(one)}`);
    return `{${members.join(", ")}}`;
  }
  return Array.isArray(value) ? `[${value.map(writeExact).join(", ")}]` : JSON.stringify(value);
}

/** Writes a float as Python does. */
export function floatText(value: number): string {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return Object.is(value, -0) ? "-0.0" : "0.0";
  const [digits = "", power = ""] = value.toExponential().split("e");
  const exponent = Number(power);
  if (exponent < -4 || exponent >= 16)
    return `${digits}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  const text = String(value);
  return text.includes(".") ? text : `${text}.0`;
}
