/** Jinja's tests: `value is name`. */

import {
  compare,
  contains,
  equal,
  Fault,
  isDict,
  isList,
  misfit,
  numeric,
  Sequence,
  shown,
  Thing,
  Tuple,
  type Value,
} from "./values.js";

type Test = readonly [args: number, run: (value: Value, other: Value) => boolean];

const eq: Test = [1, equal];
const ne: Test = [1, (value, other) => !equal(value, other)];
const lt: Test = [1, (value, other) => compare(value, other) < 0];
const le: Test = [1, (value, other) => compare(value, other) <= 0];
const gt: Test = [1, (value, other) => compare(value, other) > 0];
const ge: Test = [1, (value, other) => compare(value, other) >= 0];

function rest(value: Value, by: Value): number {
  const [a, b] = [numeric(value), numeric(by)];
  if (a === null || b === null || Number(b) === 0) misfit();
  return typeof a === "bigint" && typeof b === "bigint" ? Number(a % b) : Number(a) % Number(b);
}

/** Whether two values are the same object; None and booleans are compared by value. */
function isSame(value: Value, other: Value): boolean {
  const isPlace = [value, other].some((one) => ["string", "bigint", "number"].includes(typeof one));
  if (isPlace) throw new Fault("sameas of texts and numbers is not supported in the browser");
  return value === other;
}

function isSequence(value: Value): boolean {
  if (value instanceof Sequence) return value.kind === "range";
  return (
    typeof value === "string" ||
    isList(value) ||
    isDict(value) ||
    value instanceof Tuple ||
    value === undefined
  );
}

export const TESTS: Readonly<Record<string, Test>> = {
  defined: [0, (value) => value !== undefined],
  undefined: [0, (value) => value === undefined],
  none: [0, (value) => value === null],
  true: [0, (value) => value === true],
  false: [0, (value) => value === false],
  boolean: [0, (value) => typeof value === "boolean"],
  string: [0, (value) => typeof value === "string"],
  number: [0, (value) => numeric(value) !== null],
  integer: [0, (value) => typeof value === "bigint"],
  float: [0, (value) => typeof value === "number"],
  mapping: [0, isDict],
  iterable: [0, (value) => isSequence(value) || value instanceof Sequence],
  sequence: [0, (value) => isSequence(value)],
  callable: [
    0,
    (value) => typeof value === "function" || (value instanceof Thing && value.call !== undefined),
  ],
  even: [0, (value) => rest(value, 2n) === 0],
  odd: [0, (value) => rest(value, 2n) !== 0],
  lower: [
    0,
    (value) => shown(value) === shown(value).toLowerCase() && shown(value) !== shown(value).toUpperCase(),
  ],
  upper: [
    0,
    (value) => shown(value) === shown(value).toUpperCase() && shown(value) !== shown(value).toLowerCase(),
  ],
  divisibleby: [1, (value, by) => rest(value, by) === 0],
  in: [1, (value, where) => contains(where, value)],
  sameas: [1, isSame],
  eq,
  equalto: eq,
  "==": eq,
  ne,
  "!=": ne,
  lt,
  lessthan: lt,
  "<": lt,
  le,
  "<=": le,
  gt,
  greaterthan: gt,
  ">": gt,
  ge,
  ">=": ge,
};
