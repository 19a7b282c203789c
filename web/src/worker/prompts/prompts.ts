/** Turns a request into the model's prompt and the reader of its answers. */

import type { Manifest } from "../../artifact/manifest.js";
import type { Grammar } from "../../protocol/grammar.js";
import type { Prompt } from "../../protocol/messages.js";
import type { PieceReader } from "../answers/pieces.js";
import type { Parts } from "../loading/parts.js";
import type { TextCodec, TextStream } from "../text/types.js";
import { Chats, END } from "./chats.js";

/** A prompt, and what is needed to read its answers. */
export interface Asked {
  readonly tokens: number[];
  readonly stream: () => TextStream;
  readonly reader: () => PieceReader | null;
  /** The end of the prompt's text, and whether the answer begins with reasoning. */
  readonly end: string;
  readonly opened: boolean;
  /** The text before each answer. */
  readonly echo: string | null;
  /** The grammar of an answer whose text must match `wanted`. */
  readonly grammar: ((wanted: Grammar | null) => Promise<Grammar | null>) | null;
}

/** One model's prompts. */
export class Prompts {
  readonly chats: Chats;

  constructor(
    private readonly codec: TextCodec,
    private readonly manifest: Pick<Manifest, "answers" | "model">,
    parts: Parts,
  ) {
    this.chats = new Chats(codec, manifest.answers, parts);
  }

  /** `stop` are the strings that end an answer; `format` is the grammar of its text. */
  asked(prompt: Prompt, stop: readonly string[], format: Grammar | null = null): Asked {
    if (prompt.kind === "chat") {
      const chat = this.chats.encode(prompt);
      // A chat's answer begins a new text, unless it continues the last message.
      const context = prompt.continueLast ? chat.tokens : [];
      return {
        tokens: chat.tokens,
        end: chat.end,
        opened: chat.reasoningOpen,
        stream: () => this.codec.stream(stop, context, this.manifest.answers !== null),
        reader: () => this.chats.reader(prompt, format, chat),
        echo: null,
        grammar: (wanted) => this.chats.grammar(prompt, wanted, chat),
      };
    }
    const { text } = prompt;
    const given = typeof text === "string" ? this.codec.encode(text) : [...text];
    const { bosTokenId } = this.manifest.model;
    const tokens = given.length === 0 && bosTokenId !== null ? [bosTokenId] : given;
    return {
      tokens,
      end: typeof text === "string" ? text.slice(-END) : this.#textOf(tokens.slice(-END)),
      opened: false,
      stream: () => this.codec.stream(stop, tokens),
      reader: () => null,
      echo: prompt.echo ? (typeof text === "string" ? text : this.#textOf(tokens)) : null,
      grammar: null,
    };
  }

  #textOf(tokens: readonly number[]): string {
    const stream = this.codec.stream([]);
    return tokens.map((token) => stream.push(token).text).join("") + stream.flush();
  }
}
