import { ArtifactError } from "./errors.js";

/** A JSON value together with where it stands, so that a wrong one is reported by its path. */
export class Field {
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
    if (typeof this.value !== "object" || this.value === null || Array.isArray(this.value)) this.wrong("an object");
    return this.value as Record<string, unknown>;
  }

  at(key: string): Field {
    return new Field(this.object()[key], `${this.path}.${key}`);
  }

  /** Null where the value is null or missing. */
  optional(): Field | null {
    return this.value === undefined || this.value === null ? null : this;
  }

  list<T>(read: (field: Field) => T): T[] {
    if (!Array.isArray(this.value)) this.wrong("a list");
    return this.value.map((item: unknown, i) => read(new Field(item, `${this.path}[${i}]`)));
  }

  record<T>(read: (field: Field) => T): Map<string, T> {
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
    if (typeof value !== "number" || !Number.isSafeInteger(value) || value < min) this.wrong(`an integer ≥ ${min}`);
    return value;
  }

  oneOf<const T extends readonly string[]>(choices: T): T[number] {
    const value = this.value;
    const found = choices.find((choice) => choice === value);
    if (found === undefined) this.wrong(`one of ${choices.join(", ")}`);
    return found;
  }

  /** A relative path that stays inside the artifact: names of letters, digits and "-_.", none beginning with a dot. */
  file(): string {
    const path = this.string();
    if (!/^[\w-][\w.-]*(\/[\w-][\w.-]*)*$/.test(path)) this.wrong("a relative path inside the artifact");
    return path;
  }

  sha256(): string {
    const digest = this.string();
    if (!/^[0-9a-f]{64}$/.test(digest)) this.wrong("a SHA-256 in hexadecimal");
    return digest;
  }
}

/** A value as JSON, cut short. */
export function show(value: unknown): string {
  try {
    return JSON.stringify(value)?.slice(0, 60) ?? "nothing";
  } catch {
    return "nested too deeply to be shown";
  }
}

export function parseJson(text: string, name: string): Field {
  try {
    return new Field(JSON.parse(text), name);
  } catch (cause) {
    throw new ArtifactError(`${name} is no valid JSON. Download or build the artifact again.`, { cause });
  }
}
