/** Helpers for the JSON values of a schema's keywords. */

import type { RequestError } from "../protocol/errors.js";

export type Schema = Record<string, unknown>;

export function isObject(value: unknown): value is Schema {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A value in a message, shortened. */
export function shown(value: unknown): string {
  return (JSON.stringify(value) ?? String(value)).slice(0, 60);
}

export function isOf(value: unknown, kind: string): boolean {
  switch (kind) {
    case "number":
      return typeof value === "number";
    case "integer":
      return Number.isInteger(value);
    case "null":
      return value === null;
    case "array":
      return Array.isArray(value);
    case "object":
      return isObject(value);
    default:
      return typeof value === kind;
  }
}

/** Whether two values are equal; lists and objects that might be equal count as equal, to be safe. */
export function same(first: unknown, second: unknown): boolean {
  if (first === second) return true;
  if (Array.isArray(first) && Array.isArray(second))
    return first.length === second.length && first.every((one, at) => same(one, second[at]));
  if (!isObject(first) || !isObject(second)) return false;
  const [names, others] = [Object.keys(first), Object.keys(second)];
  return names.length === others.length && names.every((name) => same(first[name], second[name]));
}

/** Whether a value contains a whole number so large that JSON.parse may have changed it. */
export function tooLarge(value: unknown): boolean {
  if (typeof value === "object" && value !== null) return Object.values(value).some(tooLarge);
  return Number.isInteger(value) && !Number.isSafeInteger(value);
}

/** Returns the keywords' values, which must be numbers. */
export function allNumbers(own: Schema, error: (what: string) => RequestError): Schema {
  for (const [key, value] of Object.entries(own))
    if (typeof value !== "number" || !Number.isFinite(value))
      throw error(`${key} must be a number, not ${shown(value)}`);
  return own;
}

/** Returns the keywords' values, which must be whole numbers. */
export function counts(own: Schema, keys: readonly string[], error: (what: string) => RequestError): Schema {
  for (const key of keys) {
    const { [key]: value = 0 } = own;
    if (!Number.isInteger(value) || Number(value) < 0)
      throw error(`${key} must be a whole number, not ${shown(value)}`);
  }
  return Object.fromEntries(keys.filter((key) => key in own).map((key) => [key, own[key]]));
}
