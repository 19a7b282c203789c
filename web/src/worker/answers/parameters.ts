/**
 * Narrows the schema of a tool's parameters to objects, since arguments are always an object
 * (edge_runtime/tools/parameters.py does the same).
 */

import { isSchema, mayBeObject, targetOf, valuesOf } from "../../protocol/parameters.js";

type Schema = Readonly<Record<string, unknown>>;

/** The most references that are followed. */
const MOST_REFERENCES = 64;
const ANY_OBJECT: Schema = { type: "object" };
/**
 * Keys that do not restrict a value further when they stand beside a reference. Beside any other key the reference is
 * kept.
 */
const BESIDE: readonly string[] = [
  ...[
    "$ref",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$schema",
    "$id",
  ],
];

/** The schema of a call's arguments: the tool's parameters, narrowed to objects. */
export function argumentSchema(parameters: object | null | undefined): object {
  const root = isSchema(parameters) && Object.keys(parameters).length > 0 ? parameters : ANY_OBJECT;
  let followed = 0;
  /**
   * Narrows a schema to objects. References at the top are resolved, because a grammar for models that do not write
   * JSON lists the properties by name.
   */
  const objects = (schema: unknown): unknown => {
    if (schema === true) return ANY_OBJECT;
    if (!isSchema(schema)) return schema;
    const target = targetOf(schema, root);
    if (target) {
      followed += 1;
      if (followed > MOST_REFERENCES || Object.keys(schema).some((key) => !BESIDE.includes(key)))
        return { ...schema, type: "object" };
      const defined = Object.entries(schema).filter(([key]) => key === "$defs" || key === "definitions");
      return { ...(objects(target) as Schema), ...Object.fromEntries(defined) };
    }
    const values = valuesOf(schema);
    if (Array.isArray(values)) {
      const { const: _const, ...others } = schema;
      return { ...others, enum: values.filter(isSchema) };
    }
    for (const key of ["anyOf", "oneOf"]) {
      const { [key]: ways } = schema;
      if (Array.isArray(ways))
        return { ...schema, [key]: ways.filter((one) => mayBeObject(one, root)).map(objects) };
    }
    const { allOf } = schema;
    if (Array.isArray(allOf) && allOf.length === 1) return { ...schema, allOf: allOf.map(objects) };
    return { ...schema, type: "object" };
  };
  return objects(root) as object;
}
