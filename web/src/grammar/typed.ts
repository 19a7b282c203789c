/** Narrows the keywords of a JSON schema that apply to one type; typed.py does the same. */

import type { RequestError } from "../protocol/errors.js";
import { OF_TYPE, TYPES } from "./keywords.js";
import { slow, whyNot } from "./patterns.js";
import { allNumbers, counts, isObject, type Schema, shown } from "./values.js";

const KEYS: Readonly<Record<string, readonly string[]>> = OF_TYPE;

/** Handles keywords that apply to one type; the subclass walks over the schema. */
export abstract class TypedKeywords {
  protected abstract error(place: string, what: string): RequestError;
  /** Rejects the keyword, or ignores it if the schema is not strict. */
  protected abstract drop(place: string, keyword: string, why?: string): void;
  protected abstract schema(schema: unknown, place: string): Schema;
  protected abstract each(schemas: unknown, place: string): Schema;
  protected abstract list(schemas: unknown, place: string): Schema[];

  protected types(value: unknown, place: string): string[] {
    const types = Array.isArray(value) ? value : [value];
    if (types.length === 0 || types.some((kind) => !TYPES.includes(kind)))
      throw this.error(place, `type ${shown(value)} must be one or several of ${TYPES.join(", ")}`);
    return types.filter((kind) => !(kind === "integer" && types.includes("number")));
  }

  /**
   * Narrows a schema of one or several types. A schema without a type gets the types to which its keywords
   * apply.
   */
  protected typed(known: Schema, place: string): Schema {
    const spoken = Object.keys(OF_TYPE).filter((kind) => KEYS[kind]?.some((key) => key in known));
    if (!("type" in known) && spoken.length === 0) return {};
    const types = "type" in known ? this.types(known.type, place) : spoken;
    const made: Schema = { type: types.length === 1 ? types[0] : types };
    for (const kind of types) {
      const keys = KEYS[kind === "integer" ? "number" : kind] ?? [];
      const own = Object.fromEntries(keys.filter((key) => key in known).map((key) => [key, known[key]]));
      if (Object.keys(own).length > 0) Object.assign(made, this.#ofType(kind, own, place));
    }
    return made;
  }

  #ofType(kind: string, own: Schema, place: string): Schema {
    switch (kind) {
      case "string":
        return this.#string(own, place);
      case "number":
        return allNumbers(own, (what) => this.error(place, what));
      case "integer":
        return this.#integer(own, place);
      case "array":
        return this.#array(own, place);
      default:
        return this.#object(own, place);
    }
  }

  #string(own: Schema, place: string): Schema {
    Object.assign(own, this.#counts(own, ["minLength", "maxLength"], place));
    // Beside other keywords the format is only an annotation, because the library would ignore the other
    // keywords.
    if (Object.keys(own).length > 1) delete own.format;
    if ("pattern" in own) {
      const alone = Object.keys(own).length === 1;
      const why =
        whyNot(own.pattern) ?? (alone ? null : "it cannot be enforced together with minLength or maxLength");
      if (why !== null) {
        this.drop(place, "pattern", why);
        delete own.pattern;
      }
    }
    if (!("minLength" in own || "maxLength" in own)) return own;
    // Lengths become a pattern, because the library allows control characters in strings with a bounded
    // length.
    const { minLength: low = 0, maxLength: high = null, ...rest } = own;
    if (high !== null && Number(high) < Number(low))
      throw this.error(place, `minLength ${low} is greater than maxLength ${high}`);
    return { ...rest, pattern: `^.{${low},${high ?? ""}}$` };
  }

  /** Rounds the bounds of integers to integers. */
  #integer(given: Schema, place: string): Schema {
    const own = allNumbers(given, (what) => this.error(place, what)) as Record<string, number>;
    // Bounds at the ends of int64 and the like are moved inwards if that leaves any values.
    for (const [key, value] of Object.entries(own))
      if (Math.abs(value) > Number.MAX_SAFE_INTEGER) {
        const low = key === "minimum" || key === "exclusiveMinimum";
        if (value > 0 === low)
          throw this.error(place, `${key} ${value} is beyond the whole numbers that can be told apart`);
        own[key] = low ? Number.MIN_SAFE_INTEGER : Number.MAX_SAFE_INTEGER;
      }
    const { minimum, exclusiveMinimum, maximum, exclusiveMaximum } = own;
    const low = [
      minimum === undefined ? [] : Math.ceil(minimum),
      exclusiveMinimum === undefined ? [] : Math.floor(exclusiveMinimum) + 1,
    ].flat();
    const high = [
      maximum === undefined ? [] : Math.floor(maximum),
      exclusiveMaximum === undefined ? [] : Math.ceil(exclusiveMaximum) - 1,
    ].flat();
    return {
      ...(low.length > 0 && { minimum: Math.max(...low) }),
      ...(high.length > 0 && { maximum: Math.min(...high) }),
    };
  }

  #array(own: Schema, place: string): Schema {
    Object.assign(own, this.#counts(own, ["minItems", "maxItems"], place));
    const { additionalItems, uniqueItems = false } = own;
    delete own.additionalItems;
    // Up to draft 2019-09, a list in `items` describes a tuple.
    if (Array.isArray(own.items)) {
      const { items, ...rest } = own;
      delete own.items;
      Object.assign(own, rest, items.length > 0 && { prefixItems: items });
      if (additionalItems !== undefined) own.items = additionalItems;
    }
    delete own.uniqueItems;
    if (uniqueItems && Number(own.maxItems ?? 2) > 1) this.drop(place, "uniqueItems");
    this.#unevaluated(own, "unevaluatedItems", "items", place);
    const before = Array.isArray(own.prefixItems) ? own.prefixItems.length : 0;
    if (Number(own.minItems ?? 0) > before && !("items" in own)) own.items = {};
    if ("prefixItems" in own) own.prefixItems = this.list(own.prefixItems, `${place}/prefixItems`);
    if (isObject(own.items)) own.items = this.schema(own.items, `${place}/items`);
    return own;
  }

  #object(own: Schema, place: string): Schema {
    Object.assign(own, this.#counts(own, ["minProperties", "maxProperties"], place));
    this.#unevaluated(own, "unevaluatedProperties", "additionalProperties", place);
    const described = ["properties", "patternProperties", "propertyNames"].some((key) => key in own);
    if (own.minProperties && !described && !("additionalProperties" in own)) own.additionalProperties = true;
    if (isObject(own.additionalProperties))
      own.additionalProperties = this.schema(own.additionalProperties, `${place}/additionalProperties`);
    if ("properties" in own) own.properties = this.each(own.properties, `${place}/properties`);
    if ("propertyNames" in own) this.#propertyNames(own, place);
    if ("patternProperties" in own) this.#patternProperties(own, place);
    if ("required" in own) this.#required(own, place);
    if (Number(own.minProperties ?? 0) > 1 && (own.additionalProperties ?? false) !== false) {
      // A repeated name would count as two properties.
      this.drop(place, "minProperties", "with additionalProperties it is only enforced up to 1");
      delete own.minProperties;
    }
    return own;
  }

  /**
   * Handles `unevaluatedItems` and `unevaluatedProperties`: `false` forbids others than the described ones,
   * all of which stand in the same schema.
   */
  #unevaluated(own: Schema, keyword: string, others: string, place: string): void {
    const { [keyword]: value = true } = own;
    delete own[keyword];
    if (typeof value !== "boolean") this.drop(place, keyword, "only true and false are taken");
    else if (!value && !(others in own)) own[others] = false;
  }

  /**
   * Describes required properties that the schema does not describe, because the library requires only
   * described ones.
   */
  #required(own: Schema, place: string): void {
    const names: unknown = own.required;
    if (!Array.isArray(names) || !names.every((name): name is string => typeof name === "string"))
      throw this.error(place, "required must be a list of names");
    const properties = isObject(own.properties) ? own.properties : {};
    const missing = [...new Set(names)].filter((name) => !Object.hasOwn(properties, name));
    const [first] = missing;
    if (first === undefined) return;
    const others = own.additionalProperties ?? true;
    const why = `the property ${shown(first)} is not among the properties`;
    // No value fits the schema.
    if (others === false && !("patternProperties" in own))
      throw this.error(place, `'required': ${why}, and additionalProperties allows no other: add it there`);
    if ("patternProperties" in own || "propertyNames" in own) {
      this.drop(place, "required", why);
      own.required = names.filter((name) => !missing.includes(name));
      return;
    }
    const described = Object.fromEntries(missing.map((name) => [name, others === true ? {} : others]));
    own.properties = { ...properties, ...described };
  }

  #propertyNames(own: Schema, place: string): void {
    if ("properties" in own || "patternProperties" in own) {
      this.drop(
        place,
        "propertyNames",
        "it cannot be enforced together with properties or patternProperties",
      );
      delete own.propertyNames;
    } else own.propertyNames = this.schema(own.propertyNames, `${place}/propertyNames`);
  }

  #patternProperties(own: Schema, place: string): void {
    if (!isObject(own.patternProperties))
      throw this.error(place, "patternProperties must be an object of schemas");
    const why = this.#whyNotPatterns(Object.keys(own.patternProperties), own);
    if (why !== null) {
      this.drop(place, "patternProperties", why);
      delete own.patternProperties;
    } else own.patternProperties = this.each(own.patternProperties, `${place}/patternProperties`);
  }

  #whyNotPatterns(patterns: readonly string[], own: Schema): string | null {
    const first = (why: (pattern: string) => string | null): string | null =>
      patterns.map(why).find((reason) => reason !== null) ?? null;
    const bad = first(whyNot);
    if (bad !== null) return bad;
    if (patterns.length > 1) return "only one pattern can be enforced";
    if ((own.additionalProperties ?? false) !== false)
      return "it cannot be enforced together with additionalProperties";
    const names = isObject(own.properties) ? Object.keys(own.properties) : [];
    if (names.length === 0) return null;
    const late = first(slow);
    if (late !== null) return late;
    const matches = patterns.some((pattern) => names.some((name) => new RegExp(pattern, "u").test(name)));
    return matches ? "a property that is described has a name of this pattern" : null;
  }

  #counts(own: Schema, keys: readonly string[], place: string): Schema {
    return counts(own, keys, (what) => this.error(place, what));
  }
}
