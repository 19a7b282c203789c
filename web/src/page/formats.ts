/** `response_format`: the format of an answer. formats.py accepts and rejects the same. */

import { MAX_GRAMMAR_BYTES } from "../format/constants.js";
import { type ErrorCode, RequestError } from "../protocol/errors.js";
import type { Grammar } from "../protocol/grammar.js";
import { bytesOf, counted, isRecord, shown } from "./values.js";

const PARAM = "response_format";
/** The fields that each `type` allows. */
const FIELDS: Readonly<Record<string, readonly string[]>> = {
  text: [],
  json_object: [],
  json_schema: ["json_schema"],
  regex: ["regex"],
  grammar: ["grammar"],
};
const DESCRIPTION = ["name", "description", "schema", "strict"];

/** The grammar of a response_format; null where any text is allowed. The worker checks its contents. */
export function grammarOf(given: unknown): Grammar | null {
  const { type } = isRecord(given) ? given : {};
  if (!isRecord(given) || typeof type !== "string")
    throw wrong(`must be an object with a type, not ${shown(given)}`);
  const fields = Object.hasOwn(FIELDS, type) ? FIELDS[type] : undefined;
  if (!fields)
    throw wrong(
      `of type ${shown(type)} is not supported: ${Object.keys(FIELDS).join(", ")} are`,
      "unsupported",
    );
  const unknown = Object.keys(given).filter((name) => name !== "type" && !fields.includes(name));
  if (unknown.length > 0)
    throw wrong(`of type ${shown(type)} has no field ${unknown.join(", ")}; leave it out`);
  switch (type) {
    case "text":
      return null;
    case "json_object":
      return { kind: "json_object", text: "" };
    case "json_schema":
      return { kind: "json_schema", text: schemaOf(given.json_schema) };
    case "regex":
      return { kind: "regex", text: textOf("regex", given.regex) };
    default:
      return { kind: "ebnf", text: textOf("grammar", given.grammar) };
  }
}

function schemaOf(given: unknown): string {
  if (!isRecord(given))
    throw wrong(`of type "json_schema" needs json_schema: { name, schema }, not ${shown(given)}`);
  const { name, description, strict, schema } = given;
  if (typeof name !== "string" || name === "")
    throw wrong(`.json_schema.name must be a name, not ${shown(name)}`);
  const unknown = Object.keys(given).filter((field) => !DESCRIPTION.includes(field));
  if (unknown.length > 0) throw wrong(`.json_schema has no field ${unknown.join(", ")}; leave it out`);
  if (description != null && typeof description !== "string")
    throw wrong(`.json_schema.description must be a string, not ${shown(description)}`);
  if (strict != null && typeof strict !== "boolean")
    throw wrong(`.json_schema.strict must be true or false, not ${shown(strict)}`);
  if (schema != null && !isRecord(schema))
    throw wrong(`.json_schema.schema must be an object, not ${shown(schema)}`);
  return small(written(schema ?? { type: "object" }));
}

function textOf(kind: string, given: unknown): string {
  if (typeof given !== "string" || given === "")
    throw wrong(`of type ${shown(kind)} needs the field ${kind}, a string that is not empty`);
  return small(given);
}

function small(text: string): string {
  const bytes = bytesOf(text);
  if (bytes > MAX_GRAMMAR_BYTES)
    throw wrong(`takes at most ${counted(MAX_GRAMMAR_BYTES)} bytes, not ${counted(bytes)}`);
  return text;
}

function written(schema: Record<string, unknown>): string {
  try {
    return JSON.stringify(schema);
  } catch (cause) {
    throw new RequestError(`${PARAM}.json_schema.schema is not JSON`, PARAM, { cause });
  }
}

function wrong(what: string, code: ErrorCode = "invalid-request"): RequestError {
  return new RequestError(`${PARAM}${what.startsWith(".") ? "" : " "}${what}`, PARAM, { code });
}
