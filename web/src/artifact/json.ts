import { ArtifactError } from "../protocol/errors.js";

/** The type of a list's items. */
type Item<T> = NonNullable<T> extends readonly (infer I)[] ? I : never;
type Entry<T> = NonNullable<T> extends Readonly<Record<string, infer V>> ? V : never;

/**
 * A JSON value with its path, so that an error names the path of a wrong value. `T` is the type that the
 * format states: it restricts the keys that can be read, but does not vouch for the value, which each method
 * checks.
 */
export class Field<T> {
  constructor(
    readonly value: unknown,
    readonly path: string,
  ) {}

  private wrong(expected: string): never {
    throw new ArtifactError(
      `${this.path} should be ${expected}, but is ${show(this.value)}. Build the artifact again.`,
    );
  }

  private object(): Record<string, unknown> {
    if (typeof this.value !== "object" || this.value === null || Array.isArray(this.value))
      this.wrong("an object");
    return this.value as Record<string, unknown>;
  }

  at<K extends keyof NonNullable<T> & string>(key: K): Field<NonNullable<T>[K]> {
    return new Field(this.object()[key], `${this.path}.${key}`);
  }

  /** Null if the value is null or missing. */
  optional(): Field<NonNullable<T>> | null {
    return this.value === undefined || this.value === null ? null : new Field(this.value, this.path);
  }

  list<U>(read: (field: Field<Item<T>>) => U): U[] {
    if (!Array.isArray(this.value)) this.wrong("a list");
    return this.value.map((item: unknown, i) => read(new Field(item, `${this.path}[${i}]`)));
  }

  record<U>(read: (field: Field<Entry<T>>) => U): Map<string, U> {
    const entries = Object.entries(this.object());
    return new Map(entries.map(([key, item]) => [key, read(new Field(item, `${this.path}.${key}`))]));
  }

  string(): string {
    if (typeof this.value !== "string") this.wrong("a string");
    return this.value;
  }

  number(): number {
    if (typeof this.value !== "number" || !Number.isFinite(this.value)) this.wrong("a number");
    return this.value;
  }

  int(min = 0): number {
    const value = this.value;
    if (typeof value !== "number" || !Number.isSafeInteger(value) || value < min)
      this.wrong(`an integer ≥ ${min}`);
    return value;
  }

  oneOf<const C extends readonly string[]>(choices: C): C[number] {
    const value = this.value;
    const found = choices.find((choice) => choice === value);
    if (found === undefined) this.wrong(`one of ${choices.join(", ")}`);
    return found;
  }

  matching(pattern: RegExp, what: string): string {
    const text = this.string();
    if (!pattern.test(text)) this.wrong(what);
    return text;
  }

  /**
   * A relative path that stays inside the artifact: names of letters, digits and "-_.", none beginning with a
   * dot.
   */
  file(): string {
    return this.matching(/^[\w-][\w.-]*(\/[\w-][\w.-]*)*$/, "a relative path inside the artifact");
  }

  sha256(): string {
    return this.matching(/^[0-9a-f]{64}$/, "a SHA-256 in hexadecimal");
  }
}

/** A value as JSON, shortened. */
export function show(value: unknown): string {
  try {
    return JSON.stringify(value)?.slice(0, 60) ?? "nothing";
  } catch {
    return "nested too deeply to be shown";
  }
}

export function parseJson<T>(text: string, name: string): Field<T> {
  try {
    return new Field(JSON.parse(text), name);
  } catch (cause) {
    throw new ArtifactError(`${name} is not valid JSON. Download or build the artifact again.`, {
      code: "not-an-artifact",
      cause,
    });
  }
}
