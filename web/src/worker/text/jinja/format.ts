/** Python's two ways to format values in a string, and its rounding. */

import { Fault, isDict, misfit, numeric, represented, shown, Tuple, typeName, type Value } from "./values.js";

/** `form % values`, for strings and numbers without a width. */
export function formatted(form: string, values: Value): string {
  const list = values instanceof Tuple ? values.items : [values];
  let used = 0;
  const text = form.replace(
    /%(?:\((.*?)\))?([srdi%]|\.(\d+)f|f)?/gs,
    (all, name?: string, type?: string, digits?: string) => {
      if (all === "%%") return "%";
      if (!type || type === "%") throw new Fault(`the format ${form} is not supported in the browser`);
      if (name === undefined ? used >= list.length : !isDict(values)) misfit();
      const value = isDict(values) && name !== undefined ? values.get(name) : list[used++];
      if (type === "s") return shown(value);
      if (type === "r") return represented(value);
      const number = numeric(value);
      if (number === null) throw new Fault(`the format ${all} takes no ${typeName(value)}`);
      return type.endsWith("f") ? fixed(number, Number(digits ?? 6)) : String(truncated(number));
    },
  );
  if (used < list.length && !isDict(values)) misfit();
  return text;
}

/** The integer part of a number. */
export function truncated(number: bigint | number): bigint {
  if (typeof number === "bigint") return number;
  if (!Number.isFinite(number)) throw new Fault("a number is infinite");
  return BigInt(Math.trunc(number));
}

/** Writes a number with `digits` decimals. A tie of the exact value goes to the even digit. */
export function fixed(number: bigint | number, digits: number): string {
  if (!Number.isFinite(Number(number))) return Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
  const scaled = rounded(number, digits);
  const isMinus = scaled < 0n || (scaled === 0n && (Object.is(number, -0) || number < 0));
  const text = (scaled < 0n ? -scaled : scaled).toString().padStart(digits + 1, "0");
  const point = text.length - digits;
  return (isMinus ? "-" : "") + text.slice(0, point) + (digits > 0 ? `.${text.slice(point)}` : "");
}

/** `number` times 10 to the power of `digits`, rounded to an integer; a tie goes to the even one. */
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

/** `form.format(…)`, for fields by order, number or name without format specifications. */
export function filled(form: string, args: readonly Value[], named: ReadonlyMap<string, Value>): string {
  let used = 0;
  return form.replace(/\{\{|\}\}|\{([^{}]*)\}|[{}]/g, (all, name: string | undefined) => {
    if (all === "{{") return "{";
    if (all === "}}") return "}";
    const isPlain = name !== undefined && /^(?:\d+|[\p{L}_][\p{L}\p{N}_]*)?$/u.test(name);
    if (!isPlain) throw new Fault(`the format ${all} is not supported in the browser`);
    const value = name === "" ? args[used++] : /^\d/.test(name) ? args[Number(name)] : named.get(name);
    const isThere =
      name === "" ? used <= args.length : /^\d/.test(name) ? Number(name) < args.length : named.has(name);
    if (!isThere) throw new Fault(`the format ${all} has no value`);
    return shown(value);
  });
}
