/** Values of any kind, as callers give them. */

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function isFlag(value: unknown): boolean {
  return typeof value === "boolean";
}

/** What replies hold where there is nothing: `refusal: null`, `annotations: []`. */
export function isEmpty(value: unknown): boolean {
  return value == null || (Array.isArray(value) && value.length === 0);
}

/** A value in a message, in short. */
export function shown(value: unknown): string {
  try {
    return (JSON.stringify(value) ?? String(value)).slice(0, 80);
  } catch {
    // A bigint, or an object that holds itself.
    return String(value).slice(0, 80);
  }
}
