/** Python's two ways to put values into a text, and its rounding. */

import { Fault, isDict, numeric, represented, shown, Tuple, typeName, type Value } from "./values.js";

const FIELD = /%(?:\((.*?)\))?([-+ 0#]*)(\*|\d+)?(?:\.(\d+))?[hlL]?(.)/gs;

/** `form % values`. */
export function formatted(form: string, values: Value): string {
  const list = values instanceof Tuple ? [...values.items] : [values];
  let used = 0;
  const text = form.replace(
    FIELD,
    (all, name: string | undefined, flags: string, width, digits, type: string) => {
      if (type === "%") return "%";
      if (width === "*" || flags.includes("#"))
        throw new Fault(`the format ${all} is not supported in the browser`);
      if (name !== undefined && !isDict(values)) throw new Fault(`the format ${all} needs a dict`);
      if (name === undefined && used >= list.length) throw new Fault("a format has more places than values");
      const value = name !== undefined && isDict(values) ? values.get(name) : list[used++];
      return padded(field(all, type, value, digits), flags, Number(width ?? 0));
    },
  );
  if (used < list.length && !isDict(values)) throw new Fault("a format has fewer places than values");
  if (/%(?![^%]*[a-zA-Z%])/.test(form.replaceAll("%%", "")))
    throw new Fault(`the format ${form} is not complete`);
  return text;
}

function field(all: string, type: string, value: Value, digits: string | undefined): string {
  if (type === "s" || type === "r") {
    const text = type === "s" ? (value === undefined ? "" : shown(value)) : represented(value);
    return digits === undefined ? text : [...text].slice(0, Number(digits)).join("");
  }
  const number = numeric(value);
  if (number === null) throw new Fault(`the format ${all} takes a number, not ${typeName(value)}`);
  if (type === "f" || type === "F") return fixed(number, Number(digits ?? 6));
  if (digits === undefined && "diu".includes(type)) return String(truncated(number));
  if (digits === undefined && "xX".includes(type) && typeof number === "bigint") {
    const text = number.toString(16);
    return type === "X" ? text.toUpperCase() : text;
  }
  throw new Fault(`the format ${all} is not supported in the browser`);
}

function padded(text: string, flags: string, width: number): string {
  const isNumber = /^-?\d/.test(text);
  const sign = text.startsWith("-") ? "-" : flags.includes("+") ? "+" : flags.includes(" ") ? " " : "";
  const signed =
    isNumber && (flags.includes("+") || flags.includes(" ")) && !text.startsWith("-") ? sign + text : text;
  const lack = width - [...signed].length;
  if (lack <= 0) return signed;
  if (flags.includes("-")) return signed + " ".repeat(lack);
  if (!flags.includes("0") || !isNumber) return " ".repeat(lack) + signed;
  const begin = signed.length - text.replace(/^-/, "").length;
  return signed.slice(0, begin) + "0".repeat(lack) + signed.slice(begin);
}

/** The whole number before the point. */
export function truncated(number: bigint | number): bigint {
  if (typeof number === "bigint") return number;
  if (!Number.isFinite(number)) throw new Fault("an infinite number has no whole part");
  return BigInt(Math.trunc(number));
}

/** With so many digits behind the point; a tie goes to the even digit, of the exact value. */
export function fixed(number: bigint | number, digits: number): string {
  if (!Number.isFinite(Number(number))) return Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
  const scaled = rounded(number, digits);
  const isMinus = scaled < 0n || (scaled === 0n && (Object.is(number, -0) || number < 0));
  const text = (scaled < 0n ? -scaled : scaled).toString().padStart(digits + 1, "0");
  const point = text.length - digits;
  return (isMinus ? "-" : "") + text.slice(0, point) + (digits > 0 ? `.${text.slice(point)}` : "");
}

/** `number` times 10 to the power of `digits`, as a whole number; ties go to the even one. */
export function rounded(number: bigint | number, digits: number): bigint {
  let above = typeof number === "bigint" ? number : 0n;
  let below = 1n;
  if (typeof number === "number") {
    let value = number;
    let halves = 0n;
    for (; !Number.isInteger(value); value *= 2) halves++;
    above = BigInt(value);
    below = 1n << halves;
  }
  const ten = 10n ** BigInt(Math.abs(digits));
  if (digits >= 0) above *= ten;
  else below *= ten;
  const rest = ((above % below) + below) % below;
  const floor = (above - rest) / below;
  const twice = rest * 2n;
  return twice > below || (twice === below && floor % 2n !== 0n) ? floor + 1n : floor;
}

/** `form.format(…)`: fields by order, number or name, without further instructions. */
export function filled(form: string, args: readonly Value[], named: ReadonlyMap<string, Value>): string {
  let used = 0;
  return form.replace(/\{\{|\}\}|\{([^{}]*)\}|[{}]/g, (all, name: string | undefined) => {
    if (all === "{{") return "{";
    if (all === "}}") return "}";
    const isPlain = name !== undefined && /^(?:\d+|[\p{L}_][\p{L}\p{N}_]*)?$/u.test(name);
    if (!isPlain) throw new Fault(`the field ${all} of a format is not supported in the browser`);
    const value = name === "" ? args[used++] : /^\d/.test(name) ? args[Number(name)] : named.get(name);
    const isThere =
      name === "" ? used <= args.length : /^\d/.test(name) ? Number(name) < args.length : named.has(name);
    if (!isThere) throw new Fault(`the field ${all} of a format has no value`);
    return shown(value);
  });
}
