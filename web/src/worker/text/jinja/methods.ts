/** The methods of Python's strings, lists and dicts that templates call. No method changes a value. */

import { filled } from "./format.js";
import {
  capitalized,
  isBlank,
  lengthOf,
  lines,
  replaced,
  splitAt,
  stripped,
  titled,
  words,
} from "./texts.js";
import {
  equal,
  Fault,
  type Func,
  isDict,
  isList,
  keyOf,
  misfit,
  Sequence,
  Tuple,
  through,
  typeName,
  type Value,
  whole,
} from "./values.js";

type Args = readonly Value[];
/** A method: the names of its arguments, and a function that takes the arguments in that order. */
type Method<T> = readonly [names: string, run: (value: T, ...args: Args) => Value];

function text(value: Value): string {
  if (typeof value !== "string") throw new Fault(`a text is expected, not ${typeName(value)}`);
  return value;
}

function charsOf(value: Value): string | null {
  return value === undefined || value === null ? null : text(value);
}

function count(value: Value): number {
  return value === undefined ? -1 : whole(value);
}

/** Whether one of several prefixes or suffixes fits. */
function any(given: Value, fits: (one: string) => boolean): boolean {
  return given instanceof Tuple ? given.items.some((one) => fits(text(one))) : fits(text(given));
}

function split(value: string, by: Value, most: Value, fromEnd: boolean): Value {
  const by_ = charsOf(by);
  if (by_ === "") misfit();
  return by_ === null ? words(value, count(most), fromEnd) : splitAt(value, by_, count(most), fromEnd);
}

function parted(value: string, by: Value, fromEnd: boolean): Tuple {
  const mark = text(by);
  const at = fromEnd ? value.lastIndexOf(mark) : value.indexOf(mark);
  if (mark === "") misfit();
  if (at < 0) return new Tuple(fromEnd ? ["", "", value] : [value, "", ""]);
  return new Tuple([value.slice(0, at), mark, value.slice(at + mark.length)]);
}

function found(at: number, value: string): bigint {
  return BigInt(at < 0 ? -1 : lengthOf(value.slice(0, at)));
}

/** Throws if the searched part is missing (`at` is -1). */
function placed(at: number): number {
  if (at < 0) misfit();
  return at;
}

/** Whether a string has letters, all of them in one case. */
function isCase(value: string, same: string, other: string): boolean {
  return value === same && same !== other;
}

export const TEXT: Readonly<Record<string, Method<string>>> = {
  strip: ["chars", (value, chars) => stripped(value, charsOf(chars))],
  lstrip: ["chars", (value, chars) => stripped(value, charsOf(chars), "start")],
  rstrip: ["chars", (value, chars) => stripped(value, charsOf(chars), "end")],
  split: ["sep maxsplit", (value, by, most) => split(value, by, most, false)],
  rsplit: ["sep maxsplit", (value, by, most) => split(value, by, most, true)],
  splitlines: ["keepends", (value, keep) => lines(value, !!keep)],
  partition: ["sep", (value, by) => parted(value, by, false)],
  rpartition: ["sep", (value, by) => parted(value, by, true)],
  startswith: ["prefix", (value, given) => any(given, (one) => value.startsWith(one))],
  endswith: ["suffix", (value, given) => any(given, (one) => value.endsWith(one))],
  removeprefix: [
    "prefix",
    (value, one) => (value.startsWith(text(one)) ? value.slice(text(one).length) : value),
  ],
  removesuffix: [
    "suffix",
    (value, one) =>
      text(one) !== "" && value.endsWith(text(one)) ? value.slice(0, -text(one).length) : value,
  ],
  replace: ["old new count", (value, old, by, most) => replaced(value, text(old), text(by), count(most))],
  join: ["iterable", (value, items) => [...through(items)].map(text).join(value)],
  upper: ["", (value) => value.toUpperCase()],
  lower: ["", (value) => value.toLowerCase()],
  title: ["", titled],
  capitalize: ["", capitalized],
  find: ["sub", (value, one) => found(value.indexOf(text(one)), value)],
  rfind: ["sub", (value, one) => found(value.lastIndexOf(text(one)), value)],
  index: ["sub", (value, one) => found(placed(value.indexOf(text(one))), value)],
  count: [
    "sub",
    (value, one) => BigInt(text(one) === "" ? lengthOf(value) + 1 : value.split(text(one)).length - 1),
  ],
  isdigit: [
    "",
    (value) => {
      // Python counts some characters as digits, such as ²; no Unicode property that JavaScript knows covers exactly
      // these.
      if (/\p{No}/u.test(value)) throw new Fault("isdigit of this text is not supported in the browser");
      return /^\p{Nd}+$/u.test(value);
    },
  ],
  isalpha: ["", (value) => /^\p{L}+$/u.test(value)],
  isspace: ["", isBlank],
  isupper: ["", (value) => isCase(value, value.toUpperCase(), value.toLowerCase())],
  islower: ["", (value) => isCase(value, value.toLowerCase(), value.toUpperCase())],
  // `method` implements `format`, because it takes any arguments.
  format: ["", () => undefined],
};

/** Methods of lists and tuples. */
export const LIST: Readonly<Record<string, Method<readonly Value[]>>> = {
  count: ["value", (items, one) => BigInt(items.filter((each) => equal(each, one)).length)],
  index: ["value", (items, one) => BigInt(placed(items.findIndex((each) => equal(each, one))))],
};

type Pairs = ReadonlyMap<Value, Value>;

export const DICT: Readonly<Record<string, Method<Pairs>>> = {
  // `method` implements `get`, because an undefined default value differs from a missing one.
  get: ["key default", () => undefined],
  keys: ["", (value) => new Sequence("dict_keys", [...value.keys()])],
  values: ["", (value) => new Sequence("dict_values", [...value.values()])],
  items: ["", (value) => new Sequence("dict_items", pairsOf(value))],
};

/** The entries of a dict, as tuples. */
export function pairsOf(value: Pairs): Tuple[] {
  return [...value].map((pair) => new Tuple(pair));
}

/** Sorts arguments into the order of a function's argument names. Arguments that are not given are undefined. */
export function inOrder(what: string, names: string, args: Args, named: ReadonlyMap<string, Value>): Value[] {
  const order = names === "" ? [] : names.split(" ");
  if (args.length > order.length) misfit(what);
  for (const name of named.keys()) if (order.indexOf(name) < args.length) misfit(what);
  return order.map((name, at) => (at < args.length ? args[at] : named.get(name)));
}

/** The method `name` of a value, bound to that value; undefined if the value has no such method. */
export function method(value: Value, name: string): Func | undefined {
  if (typeof value === "string") {
    if (name === "format") return (args, named) => filled(value, args, named);
    return bound(TEXT, value, name);
  }
  if (isDict(value) && name === "get")
    return ([key, ...usual]) =>
      value.has(keyOf(key)) ? value.get(keyOf(key)) : usual.length > 0 ? usual[0] : null;
  if (isDict(value)) return bound(DICT, value, name);
  const items = value instanceof Tuple ? value.items : value;
  return isList(items) ? bound(LIST, items, name) : undefined;
}

function bound<T>(methods: Readonly<Record<string, Method<T>>>, value: T, name: string): Func | undefined {
  const known = Object.hasOwn(methods, name) ? methods[name] : undefined;
  if (!known) return undefined;
  const [names, run] = known;
  return (args, named) => run(value, ...inOrder(name, names, args, named));
}
