/**
 * Decides whether the schema of a tool's arguments allows an object (edge_runtime/tools/parameters.py does
 * the same).
 */

/** The most references that are followed, as in edge_runtime/tools/parameters.py. */
const MOST_REFERENCES = 64;

type Schema = Readonly<Record<string, unknown>>;

/**
 * Whether an object may fit a schema. An invalid schema counts as fitting, because the grammar's code reports
 * it.
 */
export function mayBeObject(
  schema: unknown,
  root: Schema,
  known: Map<unknown, boolean> = new Map(),
): boolean {
  if (!isSchema(schema)) return schema !== false;
  const fit = (one: unknown): boolean => mayBeObject(one, root, known);
  const { type = "object", $ref, anyOf, oneOf, allOf = [] } = schema;
  const values = valuesOf(schema);
  const target = targetOf(schema, root);
  // The grammar's code rejects a longer chain of references.
  if (target && !known.has($ref) && known.size >= MOST_REFERENCES) return true;
  if (target && !known.has($ref)) {
    // The value for a reference that leads back to itself.
    known.set($ref, true);
    known.set($ref, fit(target));
  }
  return (
    [type].flat().includes("object") &&
    (!Array.isArray(values) || values.some(isSchema)) &&
    (!target || known.get($ref) === true) &&
    [anyOf, oneOf].every((ways) => !Array.isArray(ways) || ways.length === 0 || ways.some(fit)) &&
    [allOf].flat().every(fit)
  );
}

export function isSchema(value: unknown): value is Schema {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The values that a schema lists; undefined if it lists none. */
export function valuesOf(schema: Schema): unknown {
  return "const" in schema ? [schema.const] : schema.enum;
}

/** The target of a schema's reference in the whole schema; null without one. */
export function targetOf({ $ref: pointer }: Schema, root: Schema): Schema | null {
  if (typeof pointer !== "string" || !pointer.startsWith("#/")) return null;
  let at: unknown = root;
  for (const part of pointer.split("/").slice(1)) {
    const name = part.replaceAll("~1", "/").replaceAll("~0", "~");
    at = isSchema(at) && Object.hasOwn(at, name) ? at[name] : null;
  }
  return isSchema(at) ? at : null;
}
