import { ArtifactError } from "./errors.js";

/** A JSON value together with where it stands, so that a wrong one is reported by its path. */
export class Field {
  constructor(
    readonly value: unknown,
    readonly path: string,
  ) {}

  private wrong(expected: string): never {
    const shown = JSON.stringify(this.value)?.slice(0, 60) ?? "nothing";
    throw new ArtifactError(`${this.path} should be ${expected}, but is ${shown}. Build the artifact again.`);
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

  /** A relative path that stays inside the artifact. */
  file(): string {
    const path = this.string();
    if (
      path === "" ||
      path.startsWith("/") ||
      path.includes("\\") ||
      path.includes(":") ||
      path.split("/").includes("..")
    )
      this.wrong("a relative path inside the artifact");
    return path;
  }
}

export function parseJson(text: string, name: string): Field {
  try {
    return new Field(JSON.parse(text), name);
  } catch (cause) {
    throw new ArtifactError(`${name} is no valid JSON. Download or build the artifact again.`, { cause });
  }
}
