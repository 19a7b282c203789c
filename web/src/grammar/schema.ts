/**
 * Narrows JSON schemas to what a grammar can enforce. Keywords that the library would ignore are rejected
 * here, by name and place. schema.py does the same; tests/vectors/grammars.json tests both.
 *
 * The result may be narrower than the schema: properties come in the order of the schema, without other
 * properties unless `additionalProperties` allows them, and a pattern has to match the whole string.
 */

import { RequestError } from "../protocol/errors.js";
import {
  ANNOTATIONS,
  DEFINITIONS,
  MOST_COMPARED,
  MOST_REFERENCES,
  OF_TYPE,
  STRUCTURE,
  TYPES,
} from "./keywords.js";
import { TypedKeywords } from "./typed.js";
import { isObject, isOf, type Schema, same, shown, tooLarge } from "./values.js";

const WITHOUT_MEANING: ReadonlySet<string> = new Set(ANNOTATIONS);
const KEYWORDS: ReadonlySet<string> = new Set([...STRUCTURE, ...Object.values(OF_TYPE).flat()]);
/** The most levels of a schema. */
const MOST_LEVELS = 200;

export interface Narrowing {
  /**
   * Whether keywords that cannot be enforced are rejected; otherwise they are ignored, and the text need not
   * follow them.
   */
  readonly strict?: boolean;
  /** The field of the request that an error names. */
  readonly param?: string;
}

export interface Narrowed {
  readonly schema: Schema;
  /** All schemas within the schema, by the JSON pointers that references use. */
  readonly places: ReadonlyMap<string, Schema>;
}

/**
 * The schema as a grammar can enforce it. Throws RequestError that names a keyword which cannot be enforced,
 * and its place.
 */
export function narrowed(
  schema: unknown,
  { strict = true, param = "response_format" }: Narrowing = {},
): Narrowed {
  return new Walk(schema, strict, param).made();
}

/** Walks over one schema and narrows it. */
class Walk extends TypedKeywords {
  readonly #places = new Map<string, Schema>();
  readonly #refs = new Map<string, string>();
  #compared = 0;
  #depth = 0;

  constructor(
    private readonly root: unknown,
    private readonly strict: boolean,
    private readonly param: string,
  ) {
    super();
  }

  made(): Narrowed {
    const schema = this.schema(this.root, "#");
    for (const [target, place] of this.#refs)
      if (!this.#places.has(target))
        throw this.error(place, `$ref ${shown(target)} leads to nothing that is a schema`);
    return { schema, places: this.#places };
  }

  protected error(place: string, what: string): RequestError {
    return new RequestError(
      `${this.param}: the JSON schema cannot be enforced at ${place}: ${what}`,
      this.param,
    );
  }

  protected drop(place: string, keyword: string, why = "no grammar can enforce it"): void {
    if (this.strict)
      throw this.error(place, `'${keyword}': ${why}. Leave it out, and check the answer yourself`);
  }

  protected schema(schema: unknown, place: string): Schema {
    if (schema === true) return this.#noted(place, {});
    if (!isObject(schema)) throw this.error(place, `${shown(schema)} allows nothing, or is not a schema`);
    this.#depth += 1;
    if (this.#depth > MOST_LEVELS) throw this.error("#", "it is nested too deeply; make it flatter");
    const known = Object.fromEntries(
      Object.entries(schema).filter(([key]) => !WITHOUT_MEANING.has(key) && !key.startsWith("x-")),
    );
    if (place === "#") delete known.$id;
    const definitions: Schema = {};
    for (const key of DEFINITIONS.filter((key) => key in known)) {
      definitions[key] = this.each(known[key], `${place}/${key}`);
      delete known[key];
    }
    for (const key of Object.keys(known).filter((key) => !KEYWORDS.has(key))) {
      this.drop(place, key);
      delete known[key];
    }
    const made = { ...(this.#structure(known, place) ?? this.typed(known, place)), ...definitions };
    this.#depth -= 1;
    return this.#noted(place, made);
  }

  #noted(place: string, made: Schema): Schema {
    this.#places.set(place, made);
    return made;
  }

  /**
   * The narrowed schema if one keyword determines the whole schema, such as $ref or enum; null if no such
   * keyword is there.
   */
  #structure(known: Schema, place: string): Schema | null {
    for (const key of ["$ref", "const", "enum", "allOf", "anyOf", "oneOf"] as const) {
      if (!(key in known)) continue;
      const { [key]: value } = known;
      delete known[key];
      const found = this.#ofStructure(key, value, known, place);
      if (!found) continue;
      for (const other of Object.keys(known))
        this.drop(place, other, `it cannot be enforced together with '${key}'`);
      return found;
    }
    return null;
  }

  #ofStructure(
    key: "$ref" | "const" | "enum" | "allOf" | "anyOf" | "oneOf",
    value: unknown,
    rest: Schema,
    place: string,
  ): Schema | null {
    switch (key) {
      case "$ref":
        return this.#ref(value, place);
      case "const":
        return this.#enum([value], rest, place);
      case "enum":
        return this.#enum(value, rest, place);
      case "allOf":
        if (Array.isArray(value) && value.length === 1) return this.schema(value[0], `${place}/allOf/0`);
        this.drop(place, "allOf", "only one schema can stand in it; write the schemas as one");
        return null;
      case "anyOf":
        return { anyOf: this.list(value, `${place}/anyOf`) };
      case "oneOf":
        return this.#oneOf(value, place);
    }
  }

  protected each(schemas: unknown, place: string): Schema {
    if (!isObject(schemas)) throw this.error(place, "this must be an object of schemas");
    const made = Object.entries(schemas).map(([name, one]) => [
      name,
      this.schema(one, `${place}/${name.replaceAll("~", "~0").replaceAll("/", "~1")}`),
    ]);
    return Object.fromEntries(made);
  }

  protected list(schemas: unknown, place: string): Schema[] {
    if (!Array.isArray(schemas) || schemas.length === 0)
      throw this.error(place, "this must be a list of schemas that is not empty");
    return schemas.map((one, index) => this.schema(one, `${place}/${index}`));
  }

  #ref(given: unknown, place: string): Schema | null {
    if (typeof given !== "string" || !(given === "#" || given.startsWith("#/"))) {
      this.drop(place, "$ref", "only references into the schema itself (#/…) are followed");
      return null;
    }
    const target = unquoted(given);
    const seen = new Set([place]);
    // A chain of references that leads back to itself allows any value.
    for (let at: unknown = target; typeof at === "string"; ) {
      if (seen.has(at)) throw this.error(place, `$ref ${shown(target)} leads back to itself`);
      seen.add(at);
      if (seen.size > MOST_REFERENCES)
        throw this.error(place, `$ref ${shown(target)} leads through more than ${MOST_REFERENCES} others`);
      const found = this.#at(at);
      at = isObject(found) && typeof found.$ref === "string" ? unquoted(found.$ref) : null;
    }
    if (!this.#refs.has(target)) this.#refs.set(target, place);
    return { $ref: target };
  }

  /** The value at a JSON pointer; null if there is none. */
  #at(pointer: string): unknown {
    let at: unknown = this.root;
    for (const part of pointer.split("/").slice(1)) {
      const name = part.replaceAll("~1", "/").replaceAll("~0", "~");
      if (Array.isArray(at)) at = /^\d{1,5}$/.test(part) ? at[Number(part)] : null;
      else at = isObject(at) && Object.hasOwn(at, name) ? at[name] : null;
    }
    return at ?? null;
  }

  #enum(given: unknown, rest: Schema, place: string): Schema {
    if (!Array.isArray(given)) throw this.error(place, "enum must be a list");
    const { type = TYPES, enum: also } = rest;
    const types = this.types(type, place);
    const beside = "enum" in rest;
    delete rest.type;
    delete rest.enum;
    const kept = given.filter(
      (value) =>
        (!beside || (Array.isArray(also) && also.some((one) => same(value, one)))) &&
        types.some((kind) => isOf(value, kind)),
    );
    if (kept.length === 0)
      throw this.error(place, "of enum (or const) nothing is left that the rest of the schema allows");
    if (kept.some(tooLarge))
      throw this.error(place, `enum (or const) has a whole number beyond ${Number.MAX_SAFE_INTEGER}`);
    return { enum: kept };
  }

  #oneOf(schemas: unknown, place: string): Schema {
    const made = this.list(schemas, `${place}/oneOf`);
    const given = schemas as unknown[];
    for (const [i, first] of given.entries())
      for (const [j, second] of given.entries())
        if (i < j && !this.#apart(first, second))
          this.drop(place, "oneOf", `its schemas ${i} and ${j} may both fit one value; use anyOf`);
    return { anyOf: made };
  }

  /**
   * Whether no value can fit both schemas, judged by their types, their listed values, or the schemas of a
   * property that both require.
   */
  #apart(one: unknown, other: unknown): boolean {
    this.#compared += 1;
    if (this.#compared > MOST_COMPARED)
      throw this.error("#", "its oneOf take too long to tell apart; use anyOf");
    const [first, second] = [this.#resolved(one), this.#resolved(other)];
    if (!isObject(first) || !isObject(second)) return false;
    const [values, others] = [valuesOf(first), valuesOf(second)];
    if (values && others) return !values.some((a) => others.some((b) => same(a, b)));
    const [types, theirs] = [declared(first), declared(second)];
    if (types.size > 0 && theirs.size > 0 && ![...types].some((a) => [...theirs].some((b) => overlap(a, b))))
      return true;
    if ([types, theirs].some((set) => set.size !== 1 || !set.has("object"))) return false;
    const shared = namesOf(first.required).filter((name) => namesOf(second.required).includes(name));
    return shared.some((name) => this.#apart(property(first, name), property(second, name)));
  }

  #resolved(schema: unknown): unknown {
    let at = schema;
    for (let i = 0; i < 16 && isObject(at) && typeof at.$ref === "string"; i++)
      at = this.#at(unquoted(at.$ref));
    return at;
  }
}

/** Decodes a reference, which is the fragment of a URL. */
function unquoted(reference: string): string {
  try {
    return decodeURIComponent(reference);
  } catch {
    return reference;
  }
}

function valuesOf(schema: Schema): readonly unknown[] | null {
  if ("const" in schema) return [schema.const];
  return Array.isArray(schema.enum) ? schema.enum : null;
}

/** The types that a schema allows; empty if they are not known. */
function declared(schema: Schema): Set<string> {
  const values = valuesOf(schema);
  if (values)
    return new Set(TYPES.filter((kind) => kind !== "integer" && values.some((value) => isOf(value, kind))));
  if (schema.type === undefined) return new Set("properties" in schema ? ["object"] : []);
  return new Set(namesOf(Array.isArray(schema.type) ? schema.type : [schema.type]));
}

function overlap(first: string, second: string): boolean {
  const numbers = ["integer", "number"];
  return first === second || (numbers.includes(first) && numbers.includes(second));
}

function namesOf(value: unknown): string[] {
  return Array.isArray(value) ? value.filter((name) => typeof name === "string") : [];
}

function property(schema: Schema, name: string): unknown {
  const { properties } = schema;
  return isObject(properties) && Object.hasOwn(properties, name) ? properties[name] : null;
}
