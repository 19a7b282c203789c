/** The names that templates can use: filters, tests and globals of Jinja2, and the ones that transformers adds. */

import { FILTERS, VARIED } from "./filters.js";
import { DICT, inOrder, LIST, TEXT } from "./methods.js";
import { CODES, strftime } from "./strftime.js";
import { TESTS } from "./tests.js";
import {
  Fault,
  type Func,
  type Given,
  isDict,
  isList,
  keyOf,
  misfit,
  Namespace,
  Sequence,
  shown,
  Tuple,
  through,
  type Value,
  whole,
} from "./values.js";

/** The most numbers of a range, as in Jinja's sandbox. */
const MOST_RANGE = 100_000;

export function filter(name: string, value: Value, given: Given): Value {
  const varied = Object.hasOwn(VARIED, name) ? VARIED[name] : undefined;
  if (varied) return varied(value, given, { filter, test });
  const known = Object.hasOwn(FILTERS, name) ? FILTERS[name] : undefined;
  if (!known) throw new Fault(`the filter ${name} is not supported in the browser`);
  const [names, run] = known;
  return run(value, ...inOrder(name, names, given.args, given.named));
}

export function test(name: string, value: Value, given: Given): boolean {
  const known = Object.hasOwn(TESTS, name) ? TESTS[name] : undefined;
  if (!known) throw new Fault(`the test ${name} is not supported in the browser`);
  const [count, run] = known;
  if (given.args.length !== count || given.named.size > 0) misfit(name);
  return run(value, given.args[0]);
}

function range(args: readonly Value[]): Value {
  const [first = 0, second, by = 1] = args.map(whole);
  const [start, stop] = second === undefined ? [0, first] : [first, second];
  if (args.length === 0 || args.length > 3 || by === 0) misfit();
  const count = Math.max(Math.ceil((stop - start) / by), 0);
  if (count > MOST_RANGE) throw new Fault("range is too long");
  const items = Array.from({ length: count }, (_, at) => BigInt(start + at * by));
  return new Sequence("range", items, `range(${start}, ${stop}${by === 1 ? "" : `, ${by}`})`);
}

function dict(args: readonly Value[], named: ReadonlyMap<string, Value>): Map<Value, Value> {
  const [given] = args;
  if (isDict(given)) return new Map<Value, Value>([...given, ...named]);
  const pairs = [...through(given)].map((pair): [Value, Value] => {
    const items = isList(pair) ? pair : pair instanceof Tuple ? pair.items : [];
    if (items.length !== 2) misfit();
    return [keyOf(items[0]), items[1]];
  });
  return new Map<Value, Value>([...pairs, ...named]);
}

const namespace: Func = (args, named) => {
  const made = new Namespace();
  for (const [name, value] of dict(args, named)) made.values.set(shown(name), value);
  return made;
};

const joiner: Func = (args, named) => {
  const [by = ", "] = inOrder("joiner", "sep", args, named);
  let used = false;
  return () => {
    const made = used ? by : "";
    used = true;
    return made;
  };
};

export const GLOBALS: Readonly<Record<string, Func>> = {
  range,
  dict,
  namespace,
  joiner,
  raise_exception: ([message]) => {
    throw new Fault(shown(message));
  },
  strftime_now: ([form]) => {
    if (typeof form !== "string") throw new Fault("strftime_now takes a text");
    return strftime(new Date(), form);
  },
};

export function globals(): Iterable<readonly [string, Value]> {
  return Object.entries(GLOBALS);
}

/**
 * All names that a template can use here, each with the names of its arguments. The build reads a copy of this
 * record.
 */
export function vocabulary(): Readonly<Record<string, unknown>> {
  const names = (known: Readonly<Record<string, readonly [string, unknown]>>) =>
    Object.fromEntries(Object.entries(known).map(([name, [args]]) => [name, args]));
  return {
    filters: { ...names(FILTERS), ...Object.fromEntries(Object.keys(VARIED).map((name) => [name, null])) },
    tests: Object.fromEntries(Object.entries(TESTS).map(([name, [count]]) => [name, count])),
    methods: { text: names(TEXT), list: names(LIST), dict: names(DICT) },
    globals: Object.keys(GLOBALS),
    strftime: CODES,
  };
}
