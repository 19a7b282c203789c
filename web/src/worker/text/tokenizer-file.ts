/**
 * The few facts of tokenizer.json and tokenizer_config.json that the codec reads itself, checked as they are
 * read.
 */

import { ArtifactError } from "../../both/errors.js";

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

/** Refuses a vocabulary that is not of texts and their ids, which the library takes as it comes. */
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

/** Ids that the tokenizer marks as special: they steer the model and are no part of its text. */
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
    // Older files spell a token as an AddedToken record instead of its text.
    const text = isObject(value) ? value.content : value;
    if (typeof text === "string") names[key] = text;
  }
  return names;
}

/**
 * The chat template inside tokenizer_config.json: one string, or a list of named ones of which `default` is
 * meant.
 */
export function templateOf(config: JsonObject): string | undefined {
  const template = config.chat_template;
  if (typeof template === "string") return template;
  if (!Array.isArray(template)) return undefined;
  const entries: readonly unknown[] = template;
  const chosen = entries.filter(isObject).find((entry) => entry.name === "default");
  return typeof chosen?.template === "string" ? chosen.template : undefined;
}
