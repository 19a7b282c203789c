/** `datetime.now().strftime(form)` as Python writes it in the C locale. */

import { Fault } from "./values.js";

const DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS = "January February March April May June July August September October November December".split(
  " ",
);

/** How wide a number is, and what fills it. */
const WIDTHS: Readonly<Record<string, readonly [number, string]>> = {
  ..._all("CdgHImMSUVWy", [2, "0"]),
  ..._all("ekl", [2, " "]),
  ..._all("uw", [1, "0"]),
  ..._all("GY", [1, "0"]),
  j: [3, "0"],
};

function _all(codes: string, width: readonly [number, string]): Record<string, readonly [number, string]> {
  return Object.fromEntries([...codes].map((code) => [code, width]));
}

/** What stands for others. */
const SHORT: Readonly<Record<string, string>> = {
  c: "%a %b %e %H:%M:%S %Y",
  D: "%m/%d/%y",
  F: "%Y-%m-%d",
  r: "%I:%M:%S %p",
  R: "%H:%M",
  T: "%H:%M:%S",
  x: "%m/%d/%y",
  X: "%H:%M:%S",
};

/** The letters after % that are known. */
export const CODES = `${Object.keys(WIDTHS).join("")}${Object.keys(SHORT).join("")}AaBbhpPzZnt%`;

export function strftime(date: Date, form: string): string {
  return form.replace(/%([-_0^]?)(.?)/gs, (all, flag: string, code: string) => {
    const text = named(date, code);
    if (text !== null) return flag === "^" ? text.toUpperCase() : text;
    const short = SHORT[code];
    if (short && flag === "") return strftime(date, short);
    const [width, usual] = WIDTHS[code] ?? [];
    if (width === undefined || usual === undefined || flag === "^")
      throw new Fault(`strftime_now: ${all} is not supported in the browser`);
    const number = String(numberOf(date, code));
    if (flag === "-") return number;
    return number.padStart(width, flag === "_" ? " " : flag === "0" ? "0" : usual);
  });
}

function named(date: Date, code: string): string | null {
  const day = DAYS[date.getDay()] ?? "";
  const month = MONTHS[date.getMonth()] ?? "";
  if (code === "A") return day;
  if (code === "a") return day.slice(0, 3);
  if (code === "B") return month;
  if (code === "b" || code === "h") return month.slice(0, 3);
  if (code === "p") return date.getHours() < 12 ? "AM" : "PM";
  if (code === "P") return date.getHours() < 12 ? "am" : "pm";
  if (code === "%") return "%";
  if (code === "n") return "\n";
  if (code === "t") return "\t";
  // Python's now() knows no zone.
  return code === "z" || code === "Z" ? "" : null;
}

function numberOf(date: Date, code: string): number {
  const [year, month, day, weekday] = [date.getFullYear(), date.getMonth(), date.getDate(), date.getDay()];
  // In UTC, where each day has 24 hours.
  const ofYear = Math.round((Date.UTC(year, month, day) - Date.UTC(year, 0, 1)) / 86_400_000);
  const [isoYear, isoWeek] = iso(year, ofYear, weekday);
  const made: Readonly<Record<string, number>> = {
    C: Math.floor(year / 100),
    d: day,
    e: day,
    g: isoYear % 100,
    G: isoYear,
    H: date.getHours(),
    k: date.getHours(),
    I: date.getHours() % 12 || 12,
    l: date.getHours() % 12 || 12,
    j: ofYear + 1,
    m: month + 1,
    M: date.getMinutes(),
    S: date.getSeconds(),
    u: weekday || 7,
    w: weekday,
    U: Math.floor((ofYear + 7 - weekday) / 7),
    V: isoWeek,
    W: Math.floor((ofYear + 7 - ((weekday + 6) % 7)) / 7),
    y: year % 100,
    Y: year,
  };
  return made[code] ?? 0;
}

/** The year and week of ISO 8601: of the week's Thursday. */
function iso(year: number, ofYear: number, weekday: number): readonly [number, number] {
  const thursday = new Date(Date.UTC(year, 0, 1 + ofYear - ((weekday + 6) % 7) + 3));
  const first = Date.UTC(thursday.getUTCFullYear(), 0, 1);
  return [thursday.getUTCFullYear(), 1 + Math.floor((thursday.getTime() - first) / (7 * 86_400_000))];
}
