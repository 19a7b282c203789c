import type { AnswerFormatRecord } from "../../format/constants.js";
import type { FunctionTool, TemplateVariables } from "../../protocol/openai.js";

/** The interfaces between the runtime and `index.ts`, which the runtime loads by a dynamic import. */

/** The tokenizer files of an artifact, parsed. */
export interface TextFiles {
  readonly tokenizerJson: unknown;
  readonly tokenizerConfig: unknown;
  /** The text of chat_template.jinja; it takes precedence over the templates in tokenizerConfig. */
  readonly chatTemplate?: string;
  /** The text of additional_chat_templates/tool_use.jinja, the template of conversations with tools. */
  readonly toolTemplate?: string;
}

/** The special tokens that the manifest states. */
export interface SpecialTokens {
  readonly bosTokenId: number | null;
  readonly eosTokenIds: readonly number[];
  /** How the model marks its answers: special tokens that occur in these marks can become text. */
  readonly answers?: AnswerFormatRecord | null;
}

/** What one token adds to the text. */
export interface TextDelta {
  /** Text that is now certain: whole characters that cannot be part of a stop string. */
  readonly text: string;
  /** A stop string was found; the stop string itself is not part of the text. */
  readonly stopped: boolean;
}

/** Turns the token ids of one answer into text, piece by piece. */
export interface TextStream {
  /** The number of certain code points so far, including those that are held back. */
  readonly length: number;
  push(tokenId: number): TextDelta;
  /** The text that is still held back when the answer ends without a stop string. */
  flush(): string;
}

/** A message as a chat template receives it. */
export type Told = Readonly<Record<string, unknown>> & { readonly role: string };

export interface ChatOptions {
  readonly addGenerationPrompt?: boolean;
  readonly continueLast?: boolean;
  /** The value of the template's variable `tools`. */
  readonly tools?: readonly FunctionTool[];
  /** Further variables of the template. */
  readonly variables?: TemplateVariables | undefined;
}

/** Encodes text to token ids and decodes token ids to text. */
export interface TextCodec {
  /** Encodes a text. `addSpecialTokens` (default true) lets the tokenizer add its own special tokens, such as BOS. */
  encode(text: string, options?: { readonly addSpecialTokens?: boolean }): number[];
  /** The chat template of a conversation with or without tools; null if the model has none. */
  templateFor(tools: boolean): string | null;
  /**
   * Renders a conversation as a prompt: with `continueLast` for the rest of the last message, otherwise for a new
   * answer. Throws RequestError if the model has no template.
   */
  render(messages: readonly Told[], options?: ChatOptions): string;
  /**
   * A decoder for one answer that ends at any of the `stop` strings. `context` are the tokens before the answer's
   * text: some tokenizers drop the space at the start of a text, but not in its middle. `withMarks` says that special
   * tokens which mark answers are text.
   */
  stream(stop: readonly string[], context?: readonly number[], withMarks?: boolean): TextStream;
  /**
   * The bytes that a token adds in the middle of a text; null for ids without a token and for special tokens that are
   * not marks.
   */
  tokenBytes(tokenId: number): Uint8Array | null;
  /** The text of one token alone, special tokens included, as OpenAI's logprobs show it. */
  tokenText(tokenId: number): string;
}

/** The function that `index.ts` exports to the runtime. */
export type CreateTextCodec = (files: TextFiles, special: SpecialTokens) => TextCodec | Promise<TextCodec>;
