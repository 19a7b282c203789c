import type { AnswerFormatRecord } from "../../format/constants.js";
import type { FunctionTool, TemplateVariables } from "../../protocol/openai.js";

/** What the runtime needs from a tokenizer and a chat template; it loads `index.ts` by dynamic import. */

/** The tokenizer files of an artifact, parsed. */
export interface TextFiles {
  readonly tokenizerJson: unknown;
  readonly tokenizerConfig: unknown;
  /** Contents of chat_template.jinja; wins over the templates inside tokenizerConfig. */
  readonly chatTemplate?: string;
  /** Contents of additional_chat_templates/tool_use.jinja: the template of conversations with tools. */
  readonly toolTemplate?: string;
}

/** The special tokens that the manifest states. */
export interface SpecialTokens {
  readonly bosTokenId: number | null;
  readonly eosTokenIds: readonly number[];
  /** How answers are marked: special tokens that occur in its strings may be text. */
  readonly answers?: AnswerFormatRecord | null;
}

/** What one pushed token adds to the text. */
export interface TextDelta {
  /**
   * Text that is now certain: whole characters, and nothing that could still become part of a stop string.
   */
  readonly text: string;
  /** A stop string was found; the stop string itself is not part of any text. */
  readonly stopped: boolean;
}

/** Turns the token ids of one answer into text, piece by piece. */
export interface TextStream {
  /** Characters (code points) that the tokens so far have made certain, those included that are held back. */
  readonly length: number;
  push(tokenId: number): TextDelta;
  /** The text still held back, when the answer ends without a stop string. */
  flush(): string;
}

/** A message as a chat template takes it. */
export type Told = Readonly<Record<string, unknown>> & { readonly role: string };

export interface ChatOptions {
  readonly addGenerationPrompt?: boolean;
  readonly continueLast?: boolean;
  /** What templates know as `tools`. */
  readonly tools?: readonly FunctionTool[];
  /** For the template, beside those that are always there. */
  readonly variables?: TemplateVariables | undefined;
}

/** Text to token ids and back. */
export interface TextCodec {
  /** `addSpecialTokens` (default true) lets the tokenizer add what it adds by itself, such as BOS. */
  encode(text: string, options?: { readonly addSpecialTokens?: boolean }): number[];
  /** The chat template of a conversation with tools, or without; null where the model has none. */
  templateFor(tools: boolean): string | null;
  /**
   * A conversation as text, ready for the assistant's answer; with `continueLast` for the rest of the last
   * message. Throws RequestError where the model has no template.
   */
  render(messages: readonly Told[], options?: ChatOptions): string;
  /**
   * A decoder for one answer that ends at any of the `stop` strings. `context` are the tokens that the
   * answer's text continues: some tokenizers drop the space at the start of a text, but not in its middle.
   * `withMarks`: special tokens that are marks of answers are text.
   */
  stream(stop: readonly string[], context?: readonly number[], withMarks?: boolean): TextStream;
  /** What a token adds to the middle of a text; null for special ones that are no marks, and ids without a token. */
  tokenBytes(tokenId: number): Uint8Array | null;
  /** The text of one token alone, special tokens included, as OpenAI's logprobs show it. */
  tokenText(tokenId: number): string;
}

/** The one function that `index.ts` exports to the runtime. */
export type CreateTextCodec = (files: TextFiles, special: SpecialTokens) => TextCodec | Promise<TextCodec>;
