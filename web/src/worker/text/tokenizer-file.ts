/** Reads and checks the facts of tokenizer.json and tokenizer_config.json that the codec needs itself. */

import { ArtifactError } from "../../protocol/errors.js";
import type { TextFiles } from "./types.js";

export type JsonObject = { readonly [key: string]: unknown };

export function isObject(value: unknown): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function asObject(value: unknown, what: string): JsonObject {
  if (!isObject(value)) throw new ArtifactError(`${what} should be a JSON object, found ${describe(value)}`);
  return value;
}

function describe(value: unknown): string {
  return value === null ? "null" : Array.isArray(value) ? "a list" : typeof value;
}

/** Throws if the vocabulary is not a record of texts with ids, because the library does not check it. */
export function checkVocabulary(tokenizer: JsonObject): void {
  const { vocab } = asObject(tokenizer.model, "the model of tokenizer.json");
  const isId = (id: unknown): boolean => Number.isInteger(id) && Number(id) >= 0;
  const isPiece = (piece: unknown): boolean =>
    Array.isArray(piece) && typeof piece[0] === "string" && typeof piece[1] === "number";
  const added = tokenizer.added_tokens ?? [];
  const fits =
    (isObject(vocab) ? Object.values(vocab).every(isId) : Array.isArray(vocab) && vocab.every(isPiece)) &&
    Array.isArray(added) &&
    added.every((token) => isObject(token) && isId(token.id) && typeof token.content === "string");
  if (!fits)
    throw new ArtifactError(
      "tokenizer.json has a vocabulary that is not of texts and their ids. Build it again.",
    );
}

/** Ids of the tokens that the tokenizer marks as special: they steer the model and add nothing to its text. */
export function specialIds(tokenizer: JsonObject): ReadonlySet<number> {
  const ids = new Set<number>();
  const added: readonly unknown[] = Array.isArray(tokenizer.added_tokens) ? tokenizer.added_tokens : [];
  for (const token of added) {
    if (isObject(token) && token.special === true && typeof token.id === "number") ids.add(token.id);
  }
  return ids;
}

/** The named special tokens that chat templates use as variables (`bos_token`, `eos_token`, …). */
export function namedTokens(config: JsonObject): Record<string, string> {
  const names: Record<string, string> = {};
  for (const [key, value] of Object.entries(config)) {
    if (!key.endsWith("_token")) continue;
    // Older files write a token as an AddedToken record instead of its text.
    const text = isObject(value) ? value.content : value;
    if (typeof text === "string") names[key] = text;
  }
  return names;
}

/**
 * The texts of a model's chat templates. `tools` is for conversations with tools; it is null where `plain` is null.
 */
export interface ChatTemplates {
  readonly plain: string | null;
  readonly tools: string | null;
}

/** Finds the templates, as edge_runtime/text/files.py does; tests/vectors/chat_templates.json tests both. */
export function findTemplates(
  config: JsonObject,
  { chatTemplate, toolTemplate }: Pick<TextFiles, "chatTemplate" | "toolTemplate">,
): ChatTemplates {
  const named = new Map(chatTemplate === undefined ? namedTemplates(config.chat_template) : []);
  if (chatTemplate !== undefined) named.set("default", chatTemplate);
  if (toolTemplate !== undefined) named.set("tool_use", toolTemplate);
  if (named.size > 1 && !named.has("default"))
    throw new ArtifactError(
      `of the chat templates ${[...named.keys()].join(", ")} none is called default. Correct ` +
        "tokenizer_config.json, and build the artifact again.",
    );
  const plain = named.get("default") ?? [...named.values()][0] ?? "";
  return { plain: plain || null, tools: named.get("tool_use") || null };
}

/** The templates of a tokenizer config, which has one text or a list of named ones. */
function namedTemplates(value: unknown): [string, string][] {
  if (typeof value === "string") return [["default", value]];
  const items: readonly unknown[] = Array.isArray(value) ? value : [];
  return items
    .filter(isObject)
    .flatMap(({ name, template }): [string, string][] =>
      typeof name === "string" && typeof template === "string" ? [[name, template]] : [],
    );
}
