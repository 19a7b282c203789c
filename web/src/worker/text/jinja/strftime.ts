/** `datetime.now().strftime(form)` as Python writes it in the C locale. */

import { Fault } from "./values.js";

const DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS = "January February March April May June July August September October November December".split(
  " ",
);

/** The width of a number, and the character that pads it. */
const WIDTHS: Readonly<Record<string, readonly [number, string]>> = {
  d: [2, "0"],
  e: [2, " "],
  H: [2, "0"],
  I: [2, "0"],
  j: [3, "0"],
  m: [2, "0"],
  M: [2, "0"],
  S: [2, "0"],
  y: [2, "0"],
  Y: [1, "0"],
};

/** Codes that stand for a sequence of other codes. */
const SHORT: Readonly<Record<string, string>> = {
  c: "%a %b %e %T %Y",
  D: "%m/%d/%y",
  F: "%Y-%m-%d",
  T: "%H:%M:%S",
  x: "%m/%d/%y",
  X: "%T",
};

/** All letters that may follow %. */
export const CODES = `${Object.keys(WIDTHS).join("")}${Object.keys(SHORT).join("")}AaBbhpzZ%`;

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
  if (code === "%") return "%";
  // Python's now() has no time zone.
  return code === "z" || code === "Z" ? "" : null;
}

function numberOf(date: Date, code: string): number {
  const [year, month, day] = [date.getFullYear(), date.getMonth(), date.getDate()];
  const hours = date.getHours();
  const made: Readonly<Record<string, number>> = {
    d: day,
    e: day,
    H: hours,
    I: hours % 12 || 12,
    // The day of the year is computed in UTC, where each day has 24 hours.
    j: (Date.UTC(year, month, day) - Date.UTC(year, 0, 0)) / 86_400_000,
    m: month + 1,
    M: date.getMinutes(),
    S: date.getSeconds(),
    y: year % 100,
    Y: year,
  };
  return made[code] ?? 0;
}
