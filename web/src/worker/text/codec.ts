/** The tokenizer and the chat template of one model. */

import { Tokenizer } from "@huggingface/tokenizers";
import { ArtifactError, RequestError } from "../../protocol/errors.js";
import { fixTokenizer, withMetaspaceSplit } from "./library-fixes.js";
import { AnswerStream, IncrementalDecoder } from "./stream.js";
import { ChatTemplate } from "./template.js";
import { type ByteRules, byteRules } from "./token-bytes.js";
import {
  asObject,
  checkVocabulary,
  findTemplates,
  type JsonObject,
  namedTokens,
  specialIds,
} from "./tokenizer-file.js";
import type { ChatOptions, SpecialTokens, TextCodec, TextFiles, TextStream, Told } from "./types.js";

class ModelTextCodec implements TextCodec {
  readonly #tokenizer: Tokenizer;
  readonly #rules: ByteRules;
  /**
   * Ids of tokens that add nothing to the text: all special tokens, and the special tokens that are not marks of
   * answers.
   */
  readonly #special: ReadonlySet<number>;
  readonly #silent: ReadonlySet<number>;
  readonly #template: ChatTemplate | null;
  readonly #toolTemplate: ChatTemplate | null;
  readonly #bosTokenId: number | null;

  constructor(files: TextFiles, special: SpecialTokens) {
    const file = asObject(files.tokenizerJson, "tokenizer.json");
    const config = asObject(files.tokenizerConfig ?? {}, "tokenizer_config.json");
    this.#tokenizer = openTokenizer(file, config);
    this.#rules = byteRules(file.decoder);
    this.#special = specialIds(file);
    const marks = stringsIn(special.answers);
    const isMark = (text = ""): boolean => text !== "" && marks.some((mark) => mark.includes(text));
    this.#silent = new Set([...this.#special].filter((id) => !isMark(this.#tokenizer.id_to_token(id))));
    const { plain, tools } = findTemplates(config, files);
    const opened = (source: string | null): ChatTemplate | null =>
      source === null ? null : new ChatTemplate(source, namedTokens(config));
    this.#template = opened(plain);
    this.#toolTemplate = opened(tools) ?? this.#template;
    this.#bosTokenId = special.bosTokenId;
  }

  encode(text: string, options: { readonly addSpecialTokens?: boolean } = {}): number[] {
    const addSpecialTokens = options.addSpecialTokens ?? true;
    const ids = this.#encode(wellFormed(text), addSpecialTokens);
    // An empty prompt becomes BOS, also for tokenizers that add no BOS, because a model cannot run on zero tokens.
    if (ids.length === 0 && addSpecialTokens && this.#bosTokenId !== null) return [this.#bosTokenId];
    return ids;
  }

  /** Encodes a text. Some faults of a tokenizer show only here, because the library checks them at first use. */
  #encode(text: string, addSpecialTokens: boolean): number[] {
    try {
      const { ids } = this.#tokenizer.encode(text, { add_special_tokens: addSpecialTokens });
      if (ids.every(Number.isInteger)) return ids;
      throw new Error("it gives a text tokens without an id");
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new ArtifactError(`tokenizer.json cannot be used: ${reason}. Build the artifact again.`, {
        cause,
      });
    }
  }

  templateFor(tools: boolean): string | null {
    return (tools ? this.#toolTemplate : this.#template)?.source ?? null;
  }

  render(messages: readonly Told[], options: ChatOptions = {}): string {
    const template = options.tools?.length ? this.#toolTemplate : this.#template;
    if (template === null) {
      throw new RequestError(
        "this model has no chat template; give it a plain prompt instead of messages",
        "messages",
      );
    }
    return template.render(messages, options);
  }

  stream(stop: readonly string[], context: readonly number[] = [], withMarks = false): TextStream {
    const silent = withMarks ? this.#silent : this.#special;
    const visible = (id: number) => (silent.has(id) ? undefined : this.#tokenizer.id_to_token(id));
    const begun = context.some((id) => visible(id) !== undefined);
    return new AnswerStream(visible, new IncrementalDecoder(this.#rules, begun), stop);
  }

  tokenBytes(tokenId: number): Uint8Array | null {
    const token = this.#silent.has(tokenId) ? undefined : this.#tokenizer.id_to_token(tokenId);
    return token === undefined ? null : this.#rules.bytes(token, false);
  }

  tokenText(tokenId: number): string {
    const token = this.#tokenizer.id_to_token(tokenId);
    if (token === undefined) return "";
    // The decoder acts as in the middle of a text, so that a leading space is kept.
    const decoder = new IncrementalDecoder(this.#rules, true);
    return decoder.push(token) + decoder.flush();
  }
}

/** All strings in a record and in the records that it contains. */
function stringsIn(value: unknown): string[] {
  if (typeof value === "string") return [value];
  return typeof value === "object" && value !== null ? Object.values(value).flatMap(stringsIn) : [];
}

function openTokenizer(file: JsonObject, config: JsonObject): Tokenizer {
  checkVocabulary(file);
  try {
    const tokenizer = new Tokenizer(withMetaspaceSplit(file), config);
    fixTokenizer(tokenizer);
    return tokenizer;
  } catch (error) {
    const reason = error instanceof Error ? error.message : String(error);
    throw new ArtifactError(`tokenizer.json cannot be used: ${reason}`, { cause: error });
  }
}

/** Replaces unpaired surrogates, which UTF-8 cannot encode, by U+FFFD. */
function wellFormed(text: string): string {
  return text.replace(/\p{Surrogate}/gu, "\uFFFD");
}

export function createTextCodec(files: TextFiles, special: SpecialTokens): TextCodec {
  return new ModelTextCodec(files, special);
}
