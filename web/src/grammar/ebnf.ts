/**
 * Writes a narrowed JSON schema as a grammar in EBNF. The library can read schemas itself, but its version
 * for browsers allows control characters in strings, and ignores bounds of numbers and of white space.
 */

import { FORMATS } from "./formats.js";
import { between } from "./numbers.js";
import { classRule, complement, patternRule } from "./patterns.js";
import type { Narrowed } from "./schema.js";
import { isObject, type Schema } from "./values.js";

/** The most rules of one grammar, because nested counts need many rules. */
const MOST_RULES = 5_000;
const CHARACTER = classRule([[0, 0x10ffff]]);
/** White space between the parts of JSON is bounded, because small models would write it for ever. */
const JSON_RULES = `
b ::= [ \\n\\r\\t]{0,16}
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" b "}" | "{" b pair (b "," b pair)* b "}"
pair ::= string b ":" b value
array ::= "[" b "]" | "[" b value (b "," b value)* b "]"
string ::= "\\"" rest
rest ::= "\\"" | ${CHARACTER} rest | "\\\\" escape rest
escape ::= ["\\\\/bfnrt] | "u" [0-9A-Fa-f]{4}
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
`;

/** A grammar of any JSON object. */
export const JSON_OBJECT = `root ::= object\n${JSON_RULES}`;

/** The grammar of the values that a schema allows; its first rule is `root`. */
export function ebnfOf({ schema, places }: Narrowed): string {
  const rules = new Rules(places);
  const root = rules.value(schema);
  if (root === null) throw new Error("the schema allows nothing");
  return `root ::= ${root}\n${rules.lines.join("\n")}\n${JSON_RULES}`;
}

/** An EBNF expression; null if no text matches. */
type Expression = string | null;

/** How often an item may come. */
interface Count {
  readonly least: number;
  readonly most: number | null;
}

class Rules {
  readonly lines: string[] = [];
  readonly #names = new Map<string, string>();
  #count = 0;

  constructor(private readonly places: ReadonlyMap<string, Schema>) {}

  value(schema: Schema): Expression {
    if (typeof schema.$ref === "string") return this.#ref(schema.$ref);
    if (Array.isArray(schema.enum)) return either(schema.enum.map((one) => literal(JSON.stringify(one))));
    if (Array.isArray(schema.anyOf)) return either(schema.anyOf.map((one) => this.value(one)));
    if (schema.type === undefined) return "value";
    return either([schema.type].flat().map((kind) => this.#ofType(kind, schema)));
  }

  /** The rule of a reference's target. The target may contain a reference to itself. */
  #ref(target: string): Expression {
    const known = this.#names.get(target);
    if (known) return known;
    const name = this.#name();
    this.#names.set(target, name);
    const made = this.value(this.places.get(target) ?? {});
    if (made === null) throw new Error(`${target} allows nothing`);
    this.lines.push(`${name} ::= ${made}`);
    return name;
  }

  #name(): string {
    this.#count += 1;
    if (this.#count > MOST_RULES) throw new Error("its counts are too large");
    return `r${this.#count}`;
  }

  #rule(expression: Expression): Expression {
    if (expression === null) return null;
    const name = this.#name();
    this.lines.push(`${name} ::= ${expression}`);
    return name;
  }

  #ofType(kind: unknown, schema: Schema): Expression {
    switch (kind) {
      case "null":
        return literal("null");
      case "boolean":
        return '"true" | "false"';
      case "string":
        return stringOf(schema);
      case "number":
      case "integer":
        return numberOf(schema, kind === "integer");
      case "array":
        return this.#array(schema);
      default:
        return this.#object(schema);
    }
  }

  #array({ items, prefixItems, minItems = 0, maxItems = null }: Schema): Expression {
    const before = Array.isArray(prefixItems) ? prefixItems.map((one) => this.#rule(this.value(one))) : [];
    if (items !== undefined && typeof items !== "boolean" && !isObject(items))
      throw new Error("items must be a schema; write the items of a tuple as prefixItems");
    // A tuple without a schema for further items has no further items.
    const others = items ?? before.length === 0;
    const one = others === false ? null : this.#rule(isObject(others) ? this.value(others) : "value");
    const count = { least: Number(minItems), most: maxItems === null ? null : Number(maxItems) };
    return inside("[", this.#tuple(before, one, count), "]");
  }

  /** The items of a list, which may end after any item beyond the least number. */
  #tuple(before: readonly Expression[], one: Expression, { least, most }: Count): Expression {
    let made: Expression = repeated(one, before.length > 0, {
      least: Math.max(least - before.length, 0),
      most: most === null ? null : most - before.length,
    });
    if (most !== null && most < before.length) made = null;
    for (let i = before.length - 1; i >= 0; i--) {
      const item = before[i] ?? null;
      const last = most !== null && i + 1 > most ? null : sequence(i > 0 ? COMMA : "", item, made);
      made = this.#rule(either([last, i >= least ? '""' : null]));
    }
    return made;
  }

  #object(schema: Schema): Expression {
    const { properties, required = [], minProperties = 0, maxProperties = null } = schema;
    const names = isObject(properties) ? Object.entries(properties) : [];
    const own = names.map(([name, one]) => ({
      pair: this.#pair(literal(JSON.stringify(name)), one as Schema),
      needed: (required as string[]).includes(name),
    }));
    const others = this.#others(
      schema,
      names.map(([name]) => name),
    );
    const count = {
      least: Number(minProperties),
      most: maxProperties === null ? null : Number(maxProperties),
    };
    return inside("{", this.#members(own, others, count), "}");
  }

  #pair(name: Expression, schema: Schema): Expression {
    return this.#rule(sequence(name && `(${name})`, 'b ":" b', group(this.value(schema))));
  }

  /** A property with another name than `names`; null if the schema allows no such property. */
  #others(schema: Schema, names: readonly string[]): Expression {
    const { additionalProperties, patternProperties, propertyNames } = schema;
    const values = isObject(additionalProperties) ? additionalProperties : {};
    if (isObject(patternProperties) && Object.keys(patternProperties).length > 0) {
      const pairs = Object.entries(patternProperties).map(([pattern, one]) =>
        this.#pair(quoted(patternRule(pattern)), one as Schema),
      );
      return either(pairs);
    }
    if (additionalProperties === false) return null;
    if (isObject(propertyNames)) return this.#pair(this.#nameOf(propertyNames), values);
    if (names.length === 0) return this.#pair("string", values);
    return additionalProperties === undefined ? null : this.#pair(quoted(this.#except(names)), values);
  }

  /** The strings that the schema of a property name allows, whatever other values it allows. */
  #nameOf(schema: Schema): Expression {
    if (typeof schema.$ref === "string") return this.#nameOf(this.places.get(schema.$ref) ?? {});
    if (Array.isArray(schema.anyOf)) return either(schema.anyOf.map((one) => this.#nameOf(one)));
    if (Array.isArray(schema.enum))
      return either(
        schema.enum.filter((one) => typeof one === "string").map((one) => literal(JSON.stringify(one))),
      );
    return schema.type === undefined || [schema.type].flat().includes("string") ? stringOf(schema) : null;
  }

  /** Names other than `names`, which the schema describes, because a name must not come twice. */
  #except(names: readonly string[]): Expression {
    const firsts = [
      ...new Set(
        names.filter((name) => name !== "").map((name) => String.fromCodePoint(name.codePointAt(0) ?? 0)),
      ),
    ];
    const codes = firsts.map((char) => char.codePointAt(0) ?? 0);
    const other = classRule(complement(codes.map((code) => [code, code] as const)));
    const longer = firsts
      .filter((char) => char >= " " && char !== '"' && char !== "\\")
      .map((char) => {
        const rests = names.filter((name) => name.startsWith(char)).map((name) => name.slice(char.length));
        return sequence(literal(char), this.#except(rests));
      });
    return this.#rule(either([`${other} ${CHARACTER}*`, ...longer, names.includes("") ? null : '""']));
  }

  /**
   * The properties in their order. It works from the last property to the first: `after[had]` is what may
   * follow `had` properties.
   */
  #members(
    own: readonly { readonly pair: Expression; readonly needed: boolean }[],
    others: Expression,
    { least, most }: Count,
  ): Expression {
    const cap = Math.max(least, most === null ? 1 : most + 1, 1);
    let after = Array.from({ length: Math.min(cap, own.length) + 1 }, (_, had) =>
      repeated(others, had > 0, {
        least: Math.max(least - had, 0),
        most: most === null ? null : most - had,
      }),
    );
    for (const { pair, needed } of [...own].reverse())
      after = after.map((rest, had) => {
        const next = after[Math.min(had + 1, after.length - 1)] ?? null;
        const taken = most !== null && had >= most ? null : sequence(had > 0 ? COMMA : "", pair, next);
        return this.#rule(either([taken, needed ? null : rest]));
      });
    return after[0] ?? null;
  }
}

const COMMA = 'b "," b';

/** Repeats `one` with commas between. With `begun`, a comma comes before the first one too. */
function repeated(one: Expression, begun: boolean, { least, most }: Count): Expression {
  if (most !== null && most < least) return null;
  if (one === null || most === 0) return least > 0 ? null : '""';
  const times = (from: number, to: number | null): string => `(${COMMA} (${one})){${from},${to ?? ""}}`;
  if (begun) return times(least, most);
  const some = `(${one}) ${times(Math.max(least - 1, 0), most === null ? null : most - 1)}`;
  return least > 0 ? some : `(${some})?`;
}

/** An expression between brackets, with optional white space at both ends. */
function inside(open: string, what: Expression, close: string): Expression {
  return what === null ? null : `"${open}" b (${what}) b "${close}"`;
}

function stringOf({ pattern, format }: Schema): Expression {
  if (typeof pattern === "string") return quoted(patternRule(pattern));
  const followed = typeof format === "string" && Object.hasOwn(FORMATS, format) ? FORMATS[format] : undefined;
  return followed === undefined ? "string" : quoted(patternRule(followed));
}

function numberOf(schema: Schema, whole: boolean): Expression {
  const bound = (value: unknown, included: boolean): { value: number; included: boolean } | null =>
    typeof value === "number" ? { value, included } : null;
  const { minimum, exclusiveMinimum, maximum, exclusiveMaximum } = schema;
  const lows = [bound(minimum, true), bound(exclusiveMinimum, false)].filter((one) => one !== null);
  const highs = [bound(maximum, true), bound(exclusiveMaximum, false)].filter((one) => one !== null);
  if (lows.length + highs.length === 0) return whole ? "integer" : "number";
  const [low = null] = lows.sort((a, b) => b.value - a.value || Number(a.included) - Number(b.included));
  const [high = null] = highs.sort((a, b) => a.value - b.value || Number(a.included) - Number(b.included));
  return between({ low, high }, whole);
}

function quoted(inner: Expression): Expression {
  return inner === null ? null : `"\\"" (${inner}) "\\""`;
}

/** An EBNF literal of the text. */
function literal(text: string): string {
  const codes = Array.from(text, (char) => {
    const code = char.codePointAt(0) ?? 0;
    if (/[\w {}[\]:,.-]/.test(char) && code < 128) return char;
    return code < 0x10000
      ? `\\u${code.toString(16).padStart(4, "0")}`
      : `\\U${code.toString(16).padStart(8, "0")}`;
  });
  return `"${codes.join("")}"`;
}

function group(expression: Expression): Expression {
  return expression === null ? null : `(${expression})`;
}

/** The parts one after another; empty parts are omitted. */
function sequence(...parts: readonly Expression[]): Expression {
  if (parts.includes(null)) return null;
  const some = parts.filter((part) => part !== "");
  return some.map((part) => `(${part})`).join(" ");
}

function either(expressions: readonly Expression[]): Expression {
  const some = expressions.filter((one) => one !== null);
  return some.length > 0
    ? [...new Set(some)].map((one) => (some.length > 1 ? `(${one})` : one)).join(" | ")
    : null;
}
