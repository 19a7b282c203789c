/**
 * The schema of a tool's arguments. Arguments are an object: a schema that no object fits is refused, and of one
 * that other values fit, too, the grammar gets what is left for objects (edge_runtime/tools/parameters.py).
 */

type Schema = Readonly<Record<string, unknown>>;

/** Times that references are followed. */
const MOST_STEPS = 64;
const ANY_OBJECT: Schema = { type: "object" };

/** Whether an object may fit a schema. What is no schema is said where the grammar is made. */
export function mayBeObject(schema: Schema): boolean {
  return new Parameters(schema).fit(schema);
}

/** What the arguments of a function must match: its parameters, as far as they are an object. */
export function argumentSchema(parameters: object | null | undefined): object {
  const schema = isObject(parameters) && Object.keys(parameters).length > 0 ? parameters : ANY_OBJECT;
  return new Parameters(schema).objects(schema) as object;
}

function isObject(value: unknown): value is Schema {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** One schema with the references into it. Each is followed MOST_STEPS times at most. */
class Parameters {
  readonly #fit = new Map<unknown, boolean>();
  #followed = 0;

  constructor(private readonly root: Schema) {}

  fit = (schema: unknown): boolean => {
    if (!isObject(schema)) return schema !== false;
    if (![schema.type ?? "object"].flat().includes("object")) return false;
    const values = valuesOf(schema);
    if (Array.isArray(values) && !values.some(isObject)) return false;
    const target = this.#target(schema);
    if (target && !this.#fitOf(schema.$ref, target)) return false;
    const { anyOf, oneOf, allOf } = schema;
    const some = [anyOf, oneOf].every((ways) => !hasSome(ways) || ways.some(this.fit));
    return some && (!hasSome(allOf) || allOf.every(this.fit));
  };

  #fitOf(pointer: unknown, target: Schema): boolean {
    const known = this.#fit.get(pointer);
    if (known !== undefined) return known;
    // Of a reference that leads back to itself.
    this.#fit.set(pointer, true);
    const made = this.fit(target);
    this.#fit.set(pointer, made);
    return made;
  }

  /**
   * The schema without what is no object. References at the top are followed: models that do not write JSON are
   * asked for the properties by name.
   */
  objects = (schema: unknown): unknown => {
    if (schema === true) return ANY_OBJECT;
    if (!isObject(schema)) return schema;
    const target = this.#target(schema);
    if (target) {
      if (this.#followed++ >= MOST_STEPS) return schema;
      const defined = Object.entries(schema).filter(([key]) => key === "$defs" || key === "definitions");
      return { ...(this.objects(target) as Schema), ...Object.fromEntries(defined) };
    }
    const values = valuesOf(schema);
    if (Array.isArray(values)) {
      const { const: _const, ...others } = schema;
      return { ...others, enum: values.filter(isObject) };
    }
    for (const key of ["anyOf", "oneOf"]) {
      const { [key]: ways } = schema;
      if (Array.isArray(ways)) return { ...schema, [key]: ways.filter(this.fit).map(this.objects) };
    }
    const { allOf } = schema;
    if (Array.isArray(allOf) && allOf.length === 1) return { ...schema, allOf: allOf.map(this.objects) };
    return { ...schema, type: "object" };
  };

  /** What a schema's reference into the whole one leads to; null where there is none. */
  #target({ $ref: pointer }: Schema): Schema | null {
    if (typeof pointer !== "string" || !pointer.startsWith("#/")) return null;
    let at: unknown = this.root;
    for (const part of pointer.split("/").slice(1)) {
      const name = part.replaceAll("~1", "/").replaceAll("~0", "~");
      at = isObject(at) && Object.hasOwn(at, name) ? at[name] : null;
    }
    return isObject(at) ? at : null;
  }
}

function valuesOf(schema: Schema): unknown {
  return "const" in schema ? [schema.const] : schema.enum;
}

function hasSome(ways: unknown): ways is unknown[] {
  return Array.isArray(ways) && ways.length > 0;
}
