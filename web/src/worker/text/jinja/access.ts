/** Attributes, items, calls and arithmetic of template values, as in Python and Jinja's sandbox. */

import { formatted } from "./format.js";
import { method } from "./methods.js";
import { splitAt } from "./texts.js";
import {
  Fault,
  type Func,
  isDict,
  isList,
  keyOf,
  misfit,
  numeric,
  Sequence,
  Thing,
  Tuple,
  typeName,
  unfit,
  type Value,
  whole,
} from "./values.js";

/** The most characters or items of a multiplied string or list. */
const MOST_PARTS = 16 << 20;
/** The most bits of an integer, because a bigint has no limit of its own. */
const MOST_BITS = 4096n;

/**
 * `value.name`: a method or an attribute of Python's type comes before a key of that name. `what` names the value in
 * errors.
 */
export function attribute(value: Value, name: string, what = "a value"): Value {
  if (value === undefined) throw new Fault(`${what} is undefined, and has no ${name}`);
  if (value instanceof Thing) return value.attribute(name);
  const own = method(value, name);
  if (own) return own;
  return isDict(value) ? value.get(name) : undefined;
}

/** `value[place]`; `what` names the value in errors. */
export function item(value: Value, place: Value, what = "a value"): Value {
  if (value === undefined) throw new Fault(`${what} is undefined`);
  if (isDict(value)) {
    const key = keyOf(place);
    if (value.has(key)) return value.get(key);
  }
  if (typeof place === "string")
    return value instanceof Thing ? value.attribute(place) : method(value, place);
  const at = numeric(place);
  const items = placesOf(value);
  return items && typeof at === "bigint" ? items.at(Number(at)) : undefined;
}

/** The items of a value that has numbered places; null for other values. */
function placesOf(value: Value): readonly Value[] | null {
  if (typeof value === "string") return [...value];
  if (isList(value)) return value;
  if (value instanceof Tuple) return value.items;
  return value instanceof Sequence && value.kind === "range" ? value.list : null;
}

/** `value[start:stop:step]`. */
export function sliced(value: Value, bounds: readonly Value[]): Value {
  const items = placesOf(value);
  if (!items) unfit(value, "has no parts");
  const [start = null, stop = null, by = null] = bounds.map((one) => (one === null ? null : whole(one)));
  const step = by ?? 1;
  if (step === 0) misfit();
  const { length } = items;
  const within = (at: number | null, usual: number): number => {
    if (at === null) return usual;
    const from = at < 0 ? at + length : at;
    return step > 0 ? Math.min(Math.max(from, 0), length) : Math.min(Math.max(from, -1), length - 1);
  };
  const made: Value[] = [];
  const last = within(stop, step > 0 ? length : -1);
  for (let at = within(start, step > 0 ? 0 : length - 1); step > 0 ? at < last : at > last; at += step)
    made.push(items[at]);
  if (typeof value === "string") return made.join("");
  return value instanceof Tuple ? new Tuple(made) : made;
}

export function called(
  value: Value,
  args: readonly Value[],
  named: ReadonlyMap<string, Value>,
  what: string,
): Value {
  const call: Func | undefined =
    value instanceof Thing ? value.call : typeof value === "function" ? value : undefined;
  if (!call)
    throw new Fault(
      `${what} is ${value === undefined ? "undefined" : typeName(value)}, and cannot be called`,
    );
  return call(args, named);
}

export function binary(sign: string, left: Value, right: Value): Value {
  const [a, b] = [numeric(left), numeric(right)];
  if (a !== null && b !== null) return calculated(sign, a, b);
  if (sign === "%" && typeof left === "string") return formatted(left, right);
  if (sign === "+") {
    if (typeof left === "string" && typeof right === "string") return left + right;
    if (isList(left) && isList(right)) return joined(left, right);
    if (left instanceof Tuple && right instanceof Tuple) return new Tuple(joined(left.items, right.items));
  }
  if (sign === "*" && typeof b === "bigint") return repeated(left, Number(b));
  if (sign === "*" && typeof a === "bigint") return repeated(right, Number(a));
  throw new Fault(`${typeName(left)} ${sign} ${typeName(right)} cannot be calculated`);
}

function joined(left: readonly Value[], right: readonly Value[]): Value[] {
  bounded(left.length + right.length);
  return [...left, ...right];
}

function bounded(parts: number): void {
  if (parts > MOST_PARTS) throw new Fault("it makes too many parts");
}

function repeated(value: Value, times: number): Value {
  const items = typeof value === "string" ? value : value instanceof Tuple ? value.items : value;
  if (typeof items !== "string" && !isList(items)) unfit(value, "cannot be multiplied");
  const count = items.length && Math.max(times, 0);
  bounded(items.length * count);
  if (typeof items === "string") return items.repeat(count);
  const made = Array.from({ length: count }, () => items).flat();
  return value instanceof Tuple ? new Tuple(made) : made;
}

function calculated(sign: string, a: bigint | number, b: bigint | number): Value {
  if (["/", "//", "%"].includes(sign) && Number(b) === 0) throw new Fault("division by zero");
  if (typeof a === "bigint" && typeof b === "bigint" && sign !== "/" && !(sign === "**" && b < 0n))
    return ofWhole(sign, a, b);
  return ofFloats(sign, Number(a), Number(b));
}

function ofWhole(sign: string, a: bigint, b: bigint): bigint {
  if (sign === "+") return a + b;
  if (sign === "-") return a - b;
  if (sign === "//" || sign === "%") {
    const rest = ((a % b) + b) % b;
    return sign === "%" ? rest : (a - rest) / b;
  }
  const bits = (number: bigint): bigint => BigInt(number.toString(2).length);
  if ((sign === "*" ? bits(a) + bits(b) : bits(a) * b) > MOST_BITS)
    throw new Fault("it makes too large a number");
  return sign === "*" ? a * b : a ** b;
}

function ofFloats(sign: string, a: number, b: number): number {
  if (sign === "+") return a + b;
  if (sign === "-") return a - b;
  if (sign === "*") return a * b;
  if (sign === "/") return a / b;
  if (sign === "**") return a ** b;
  const rest = a % b;
  // As in Python, the remainder has the sign of the divisor.
  const mod = rest !== 0 && rest < 0 !== b < 0 ? rest + b : rest;
  return sign === "%" ? mod : Math.round((a - mod) / b);
}

/** The value at a path of names and numbers with dots between them, as filters take it. */
export function atPath(value: Value, path: Value, usual: Value = undefined): Value {
  const parts = typeof path === "string" ? splitAt(path, ".") : path === null ? [] : [path];
  return parts.reduce((made: Value, part) => {
    const place = typeof part === "string" && /^\d+$/.test(part) ? BigInt(part) : part;
    const found = item(made, place);
    return found === undefined && usual !== undefined && usual !== null ? usual : found;
  }, value);
}
