/** Writes the grammar of arguments that are not JSON, as parts of a structural tag. */

import { narrowed } from "../../grammar/schema.js";
import { RequestError } from "../../protocol/errors.js";
import type { Spelling } from "./format.js";
import {
  type Around,
  constant,
  either,
  inOrder,
  NOTHING,
  repeated,
  type SpelledArguments,
  schemaTag,
  type Tag,
  tag,
} from "./tags.js";
import { isObject, type Values, written } from "./values.js";

/** Keywords of a schema that can be enforced for values which are not JSON. */
const KNOWN = new Set(
  (
    "type enum const properties required items pattern anyOf minimum maximum exclusiveMinimum " +
    "exclusiveMaximum minItems"
  ).split(" "),
);
const ANNOTATIONS = new Set("title description default examples format additionalProperties".split(" "));
const DEFINITIONS = ["$defs", "definitions"];

/**
 * Writes the grammar of a tool's arguments. If arguments have a separator between them, the required ones come first.
 */
export const spelledArguments: SpelledArguments = (spelling, schema, strict) =>
  new Spelled(spelling, narrowed(schema, { strict, param: "tools" }).schema).arguments();

type Names = readonly [before: string, after: string, behind: string];

/** Writes the grammar of one tool's arguments. */
class Spelled {
  constructor(
    private readonly spelling: Spelling,
    private readonly root: Values,
  ) {}

  arguments(): Around {
    return this.#object(this.root, "#");
  }

  /** The grammar of all arguments: the schema is an object's, or `anyOf` with several such schemas. */
  #object(schema: Values, place: string): Around {
    const { before_name, after_name, after_value, begin, end } = this.spelling;
    if ("enum" in schema) throw refusal(place, "enum and const of lists and objects");
    if (Array.isArray(schema.anyOf)) {
      const ways = (schema.anyOf as Values[]).map((one, at) => this.#object(one, `${place}/anyOf/${at}`));
      return tag("", either(ways), "");
    }
    return this.#members(schema, place, [begin, end], [before_name, after_name, after_value]);
  }

  /** The grammar of an object's properties, each as `before` + name + `after` + value + `behind`. */
  #members(
    schema: Values,
    place: string,
    [begin, end]: readonly [string, string],
    [before, after, behind]: Names,
  ): Around {
    const { separator } = this.spelling;
    const required: readonly unknown[] = Array.isArray(schema.required) ? schema.required : [];
    const isRequired = (name: string): boolean => required.includes(name);
    const properties = Object.entries(isObject(schema.properties) ? schema.properties : {});
    // The sort is stable, so that properties otherwise keep their order.
    if (separator) properties.sort(([a], [b]) => Number(isRequired(b)) - Number(isRequired(a)));
    const values = new Map(
      properties.map(([name, one]) => [name, this.#value(one, `${place}/properties/${name}`)]),
    );
    const member = (name: string, lead: string): Tag =>
      tag(lead + before + name + after, values.get(name) ?? NOTHING, behind);
    const rest = (names: readonly string[], lead: string): Tag[] =>
      names.map((name) => {
        const made = member(name, lead);
        return isRequired(name) ? made : either([made, NOTHING]);
      });
    const order = properties.map(([name]) => name);
    const [first] = order;
    let parts: Tag[];
    if (!separator || first === undefined) parts = rest(order, "");
    else if (isRequired(first)) parts = [member(first, ""), ...rest(order.slice(1), separator)];
    else {
      const starts = order.map((name, at) =>
        inOrder([member(name, ""), ...rest(order.slice(at + 1), separator)]),
      );
      parts = [either([...starts, NOTHING])];
    }
    return tag(begin, parts.length > 0 ? inOrder(parts) : NOTHING, end);
  }

  #value(schema: unknown, place: string): Tag {
    const { raw, quotes } = this.spelling;
    if (raw) return this.#raw(schema, place);
    if (quotes.length === 0 && !hasWords(schema)) return this.#json(schema);
    const fixed = fixedOf(schema);
    if (fixed) return either(fixed.map((value) => this.#constant(value, place)));
    return either(this.#kinds(schema, place).map((kind) => this.#typed(kind, schema as Values, place)));
  }

  /** A value that is written without quotes, up to the mark behind it. */
  #raw(schema: unknown, place: string): Tag {
    const kinds = this.#kinds(schema, place);
    if (kinds.length !== 1 || kinds[0] !== "string") return this.#json(schema);
    const fixed = fixedOf(schema);
    if (fixed) return either(fixed.map((value) => (value ? constant(String(value)) : NOTHING)));
    return textOf(schema as Values);
  }

  #typed(kind: string, schema: Values, place: string): Tag {
    const [yes = "", no = "", nothing = ""] = this.spelling.words;
    const [open, close] = this.spelling.quotes;
    if (kind === "boolean") return either([constant(yes), constant(no)]);
    if (kind === "null") return constant(nothing);
    if (open && close) {
      if (kind === "string") return tag(open, textOf(schema), close);
      if (kind === "array") return this.#array(schema, place);
      if (kind === "object") return this.#members(schema, place, ["{", "}"], ["", ":", ""]);
    }
    const { anyOf: _anyOf, type: _type, ...bounds } = schema;
    return this.#json({ ...bounds, type: kind });
  }

  #array(schema: Values, place: string): Tag {
    const item = this.#value(schema.items ?? { type: "string" }, `${place}/items`);
    if (item.type === "json_schema") return this.#json(schema);
    const items = item.type === "or" ? (item.elements as readonly Tag[]) : [item];
    const tags = items.map((one) => (one.type === "tag" ? one : tag(String(one.value), NOTHING, "")));
    return tag("[", repeated(tags, ",", Number(schema.minItems ?? 0)), "]");
  }

  #constant(value: unknown, place: string): Tag {
    const [yes = "", no = "", nothing = ""] = this.spelling.words;
    if (value === null) return constant(nothing);
    if (typeof value === "boolean") return constant(value ? yes : no);
    const [open, close] = this.spelling.quotes;
    if (typeof value === "string" && open && close) return constant(open + value + close);
    if (typeof value === "object") throw refusal(place, "enum and const of lists and objects");
    return constant(written(value));
  }

  /** The names of the JSON types that a value can have. */
  #kinds(schema: unknown, place: string): string[] {
    if (!isObject(schema)) throw refusal(place, `the schema ${JSON.stringify(schema)?.slice(0, 60)}`);
    const [unknown] = Object.keys(schema)
      .filter((key) => !KNOWN.has(key) && !ANNOTATIONS.has(key))
      .sort();
    if (unknown !== undefined) throw refusal(place, unknown);
    if (Array.isArray(schema.anyOf)) {
      const ways: readonly Values[] = schema.anyOf;
      const kinds = ways.flatMap((one) => this.#kinds(one, place));
      if (ways.some((one) => Object.keys(one).some((key) => key !== "type" && !ANNOTATIONS.has(key))))
        throw refusal(place, "anyOf of more than types");
      return [...new Set(kinds)];
    }
    const fixed = fixedOf(schema);
    const kinds = schema.type ?? (fixed ? [...new Set(fixed.map(kindOf))].sort() : "string");
    return [kinds].flat().map(String);
  }

  /** A value that is written as JSON; its schema gets the definitions that its references name. */
  #json(schema: unknown): Tag {
    const defined = DEFINITIONS.filter((key) => Object.hasOwn(this.root, key)).map((key) => [
      key,
      this.root[key],
    ]);
    return schemaTag(
      isObject(schema) ? { ...schema, ...Object.fromEntries(defined) } : schema,
      false,
      "tools",
    );
  }
}

function textOf({ pattern }: Values): Tag {
  if (typeof pattern !== "string") return { type: "any_text" };
  return { type: "regex", pattern: pattern.replace(/^\^/, "").replace(/\$$/, "") };
}

/** Whether a schema allows true, false or null itself, for which the spelling has its own words. */
function hasWords(schema: unknown): boolean {
  if (!isObject(schema)) return false;
  if (fixedOf(schema)?.some((value) => value === null || typeof value === "boolean")) return true;
  if (Array.isArray(schema.anyOf) && schema.anyOf.some(hasWords)) return true;
  return [schema.type].flat().some((kind) => kind === "boolean" || kind === "null");
}

function fixedOf(schema: unknown): readonly unknown[] | null {
  if (!isObject(schema)) return null;
  if ("const" in schema) return [schema.const];
  return Array.isArray(schema.enum) ? schema.enum : null;
}

function kindOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  if (typeof value === "number") return Number.isInteger(value) ? "integer" : "number";
  return typeof value;
}

function refusal(place: string, what: string): RequestError {
  return new RequestError(
    `tools: the schema at ${place} cannot be enforced in the way that this model writes arguments: ${what}; ` +
      "describe the parameter more simply",
    "tools",
  );
}
