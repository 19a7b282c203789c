/** Helpers for values of any kind, as callers give them. */

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function isFlag(value: unknown): boolean {
  return typeof value === "boolean";
}

/** Whether a value is one with which replies express nothing: `refusal: null`, `annotations: []`. */
export function isEmpty(value: unknown): boolean {
  return value == null || (Array.isArray(value) && value.length === 0);
}

/** Bytes of a text in UTF-8, which limits count. */
export function bytesOf(text: string): number {
  return new TextEncoder().encode(text).length;
}

/** A number in a message, as Python writes it. */
export function counted(number: number): string {
  return number.toLocaleString("en");
}

/** A value in a message, shortened. */
export function shown(value: unknown): string {
  try {
    return (JSON.stringify(value) ?? String(value)).slice(0, 80);
  } catch {
    // The value is a bigint, or an object that contains itself.
    return String(value).slice(0, 80);
  }
}
