/** Bounds what a grammar is compiled from (edge_runtime/tools/parameters.py does the same). */

import { MAX_SCHEMAS_BYTES } from "../../format/constants.js";
import { ANNOTATIONS } from "../../grammar/keywords.js";
import { RequestError } from "../../protocol/errors.js";
import type { FunctionTool } from "../../protocol/openai.js";
import { isSchema } from "../../protocol/parameters.js";

/** Keywords whose value has names of the schema's author, each with a schema. */
const NAMED: readonly string[] = [
  "properties",
  "patternProperties",
  "dependentSchemas",
  "$defs",
  "definitions",
];
/** Keywords whose value is not a schema. */
const VALUES: readonly string[] = ["const", "enum"];

/** Throws RequestError for tools whose schemas have more than MAX_SCHEMAS_BYTES together. */
export function checkSchemas(tools: readonly FunctionTool[]): void {
  const texts = tools.map((tool) => JSON.stringify(bare(tool.function.parameters ?? null)));
  const size = texts.reduce((sum, text) => sum + new TextEncoder().encode(text).length, 0);
  if (size <= MAX_SCHEMAS_BYTES) return;
  const [given, most] = [size, MAX_SCHEMAS_BYTES].map((bytes) => bytes.toLocaleString("en"));
  throw new RequestError(
    `tools: their schemas have ${given} bytes without descriptions, and a grammar takes at most ${most}; ` +
      'offer fewer tools or simpler ones, or send tool_choice "none"',
    "tools",
  );
}

/** A schema without annotations. */
function bare(schema: unknown): unknown {
  if (Array.isArray(schema)) return schema.map(bare);
  if (!isSchema(schema)) return schema;
  const annotations: readonly string[] = ANNOTATIONS;
  const kept = Object.entries(schema).filter(([key]) => !annotations.includes(key) && !key.startsWith("x-"));
  return Object.fromEntries(
    kept.map(([key, value]) => [key, VALUES.includes(key) ? value : barePart(key, value)]),
  );
}

function barePart(key: string, value: unknown): unknown {
  if (!NAMED.includes(key) || !isSchema(value)) return bare(value);
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, bare(one)]));
}
