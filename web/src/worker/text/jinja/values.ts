/**
 * The values of a template, with the types of Python. Undefined is `undefined`, None is `null`, ints are bigints and
 * floats are numbers, so that 1 and 1.0 differ and a long number keeps all digits.
 */

import { Exact, floatText, isWhole } from "./exact.js";
import { compareTexts, lengthOf, quoted } from "./texts.js";

export type Value =
  | undefined
  | null
  | boolean
  | bigint
  | number
  | string
  | readonly Value[]
  | Dict
  | Tuple
  | Sequence
  | Thing
  | Func;
export type Dict = ReadonlyMap<Value, Value>;
export type Func = (args: readonly Value[], named: ReadonlyMap<string, Value>) => Value;

/** The arguments that a filter, a test or a macro receives beside its value. */
export interface Given {
  readonly args: readonly Value[];
  readonly named: ReadonlyMap<string, Value>;
}

/** The template asks for something that cannot be done with its values, or it calls raise_exception. */
export class Fault extends Error {}

export class Tuple {
  constructor(readonly items: readonly Value[]) {}
}

/**
 * An iterable that is not a list: a range, the keys, values or items of a dict, or the result of a filter. A sequence
 * of kind "generator" has no length and can be read once; its `items` may be computed on demand.
 */
export class Sequence {
  #rest: Iterator<Value> | null = null;

  constructor(
    readonly kind: "range" | "dict_keys" | "dict_values" | "dict_items" | "generator",
    readonly items: Iterable<Value>,
    readonly text = "",
  ) {}

  /** The items; a generator continues where an earlier loop stopped. */
  through(): Iterable<Value> {
    if (this.kind !== "generator") return this.items;
    this.#rest ??= this.items[Symbol.iterator]();
    const rest = this.#rest;
    // The iterator has no `return`, so that a loop that stops early does not end the generator.
    return { [Symbol.iterator]: () => ({ next: () => rest.next() }) };
  }

  get list(): readonly Value[] {
    if (this.kind === "generator") throw new Fault("a generator has no length or places");
    return [...this.items];
  }
}

/** A value with attributes: a loop, a namespace, a macro. */
export abstract class Thing {
  abstract attribute(name: string): Value;
  /** The function behind a value that can be called. */
  readonly call?: Func;
}

export class Namespace extends Thing {
  readonly values = new Map<string, Value>();

  override attribute(name: string): Value {
    return this.values.get(name);
  }
}

export function isDict(value: Value): value is Dict {
  return value instanceof Map;
}

export function isList(value: Value): value is readonly Value[] {
  return Array.isArray(value);
}

/** The key of a dict entry. Python takes 1, 1.0 and true for the same key; keys that would need this are rejected. */
export function keyOf(value: Value): Value {
  if (typeof value === "string" || typeof value === "bigint" || value === null) return value;
  unfit(value, "as a key of a dict is not supported in the browser");
}

/** Converts JavaScript values to template values, as Python would read them from their JSON. */
export function fromJs(value: unknown): Value {
  if (value instanceof Exact) return value.value;
  if (typeof value === "number") return fromNumber(value);
  if (Array.isArray(value)) return value.map(fromJs);
  if (typeof value !== "object" || value === null)
    return typeof value === "function" || typeof value === "symbol" ? undefined : (value as Value);
  const entries = Object.entries(value).filter(([, one]) => one !== undefined);
  return new Map(entries.map(([name, one]) => [name, fromJs(one)]));
}

function fromNumber(value: number): Value {
  const text = JSON.stringify(value);
  return isWhole(text) ? BigInt(text) : value;
}

export function truth(value: Value): boolean {
  if (isList(value)) return value.length > 0;
  if (value instanceof Tuple) return value.items.length > 0;
  if (isDict(value)) return value.size > 0;
  if (value instanceof Sequence) return value.kind === "generator" || value.list.length > 0;
  return !!value || Number.isNaN(value);
}

/** The value as a number, with booleans as 0 and 1; null if it is not a number. */
export function numeric(value: Value): bigint | number | null {
  if (typeof value === "boolean") return value ? 1n : 0n;
  return typeof value === "bigint" || typeof value === "number" ? value : null;
}

/** The value as a whole number, for a place or a width. */
export function whole(value: Value): number {
  const number = numeric(value);
  if (typeof number !== "bigint") unfit(value, "is not a whole number");
  return Number(number);
}

export function equal(a: Value, b: Value): boolean {
  const [x, y] = [numeric(a), numeric(b)];
  // biome-ignore lint/suspicious/noDoubleEquals: JavaScript compares a bigint and a number by value so.
  if (x !== null && y !== null) return x == y;
  if (isList(a) && isList(b)) return equalLists(a, b);
  if (a instanceof Tuple && b instanceof Tuple) return equalLists(a.items, b.items);
  if (isDict(a) && isDict(b))
    return a.size === b.size && [...a].every(([key, one]) => b.has(key) && equal(one, b.get(key)));
  if (a instanceof Sequence && b instanceof Sequence && a.kind === b.kind && a.kind !== "generator")
    return equalLists(a.list, b.list);
  return a === b;
}

function equalLists(a: readonly Value[], b: readonly Value[]): boolean {
  return a.length === b.length && a.every((one, at) => equal(one, b[at]));
}

/** Negative if `a` sorts before `b`, positive if behind; NaN if the values have no order. */
export function compare(a: Value, b: Value): number {
  const [x, y] = [numeric(a), numeric(b)];
  if (x !== null && y !== null) return x < y ? -1 : x > y ? 1 : equal(x, y) ? 0 : Number.NaN;
  if (typeof a === "string" && typeof b === "string") return compareTexts(a, b);
  if (isList(a) && isList(b)) return compareLists(a, b);
  if (a instanceof Tuple && b instanceof Tuple) return compareLists(a.items, b.items);
  throw new Fault(`${typeName(a)} and ${typeName(b)} have no order`);
}

function compareLists(a: readonly Value[], b: readonly Value[]): number {
  const at = a.findIndex((one, place) => place >= b.length || !equal(one, b[place]));
  if (at < 0) return a.length - b.length;
  return at < b.length ? compare(a[at], b[at]) : 1;
}

/** The items over which a loop iterates. */
export function through(value: Value): Iterable<Value> {
  if (isList(value)) return value;
  if (isDict(value)) return value.keys();
  if (value instanceof Tuple) return value.items;
  if (value instanceof Sequence) return value.through();
  if (typeof value === "string") return value;
  if (value === undefined) return [];
  unfit(value, "is not iterable");
}

/** `len(value)`. */
export function size(value: Value): number {
  if (typeof value === "string") return lengthOf(value);
  if (isDict(value)) return value.size;
  if (value instanceof Sequence) return value.list.length;
  if (isList(value) || value instanceof Tuple || value === undefined) return [...through(value)].length;
  unfit(value, "has no length");
}

/** `item in value`. */
export function contains(value: Value, item: Value): boolean {
  if (typeof value === "string") {
    if (typeof item !== "string") unfit(item, "is not in a text, only a text can be");
    return value.includes(item);
  }
  if (isDict(value)) return value.has(keyOf(item));
  for (const one of through(value)) if (equal(one, item)) return true;
  return false;
}

/** The name of the value's type in Python. */
export function typeName(value: Value): string {
  if (value === undefined) return "an undefined value";
  if (value === null) return "None";
  if (typeof value === "boolean") return "a bool";
  if (typeof value === "string") return "a text";
  if (typeof value === "bigint" || typeof value === "number") return "a number";
  if (isList(value)) return "a list";
  if (isDict(value)) return "a dict";
  if (value instanceof Tuple) return "a tuple";
  return value instanceof Sequence ? `a ${value.kind}` : "a function";
}

/** Throws for arguments that are too many, too few or of a wrong type. `what` names the called function. */
export function misfit(what = "something"): never {
  throw new Fault(`${what} is given wrong arguments`);
}

/** Throws for an operation that the type of the value does not support. */
export function unfit(value: Value, what: string): never {
  throw new Fault(`${typeName(value)} ${what}`);
}

/** `str(value)`. */
export function shown(value: Value): string {
  if (typeof value === "string") return value;
  return value === undefined ? "" : represented(value);
}

/** `repr(value)`. */
export function represented(value: Value): string {
  if (value === undefined) return "Undefined";
  if (value === null) return "None";
  if (typeof value === "string") return quoted(value);
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "bigint") return String(value);
  if (typeof value === "number") return floatText(value);
  if (isList(value)) return `[${value.map(represented).join(", ")}]`;
  if (isDict(value))
    return `{${[...value].map(([key, one]) => `${represented(key)}: ${represented(one)}`).join(", ")}}`;
  if (value instanceof Tuple)
    return `(${value.items.map(represented).join(", ")}${value.items.length === 1 ? "," : ""})`;
  if (value instanceof Sequence && value.kind === "range") return value.text;
  if (value instanceof Sequence && value.kind !== "generator")
    return `${value.kind}(${represented(value.list)})`;
  if (value instanceof Namespace) return `<Namespace ${represented(value.values)}>`;
  unfit(value, "cannot be written into a text");
}
