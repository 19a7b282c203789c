/** Renders chat templates with the variables that transformers gives them. */

import { ArtifactError, RequestError } from "../../protocol/errors.js";
import { type Body, fromJs, parse, render, type Value } from "./jinja/index.js";
import type { ChatOptions, Told } from "./types.js";

export class ChatTemplate {
  readonly #template: Body;
  readonly #tokens: Readonly<Record<string, string>>;

  constructor(
    readonly source: string,
    tokens: Readonly<Record<string, string>>,
  ) {
    try {
      this.#template = parse(source);
    } catch (error) {
      throw new ArtifactError(`the model's chat template cannot be parsed: ${reason(error)}`, {
        cause: error,
      });
    }
    this.#tokens = tokens;
  }

  /**
   * Renders a conversation. With `continueLast` the text ends with the content of the last message, and the answer
   * continues from there.
   */
  render(messages: readonly Told[], options: ChatOptions = {}): string {
    if (!options.continueLast) return this.#render(messages, options);
    return untilMark(this.#render(marked(messages), { ...options, addGenerationPrompt: false }));
  }

  #render(
    messages: readonly Told[],
    { addGenerationPrompt = true, tools = [], variables }: ChatOptions,
  ): string {
    const own = { messages, add_generation_prompt: addGenerationPrompt, ...(tools.length > 0 && { tools }) };
    try {
      const given = Object.entries({ ...variables, ...this.#tokens, ...own });
      return render(this.#template, new Map<string, Value>(given.map(([name, one]) => [name, fromJs(one)])));
    } catch (error) {
      // A template rejects a conversation on purpose, for instance two user turns in a row; its own words say why.
      throw new RequestError(
        `the model's chat template rejected the messages: ${reason(error)}`,
        "messages",
        {
          cause: error,
        },
      );
    }
  }
}

/**
 * Marks the end of the content that the answer continues. A search for the content itself could find a short content
 * in the template's own words.
 */
const MARK = "[the-answer-goes-on-here]";

function marked(messages: readonly Told[]): Told[] {
  return messages.map((message, at) =>
    at === messages.length - 1 ? { ...message, content: `${message.content}${MARK}` } : message,
  );
}

function untilMark(text: string): string {
  const at = text.lastIndexOf(MARK);
  if (at >= 0) return text.slice(0, at);
  throw new RequestError(
    "the chat template leaves out the last message, so it cannot be continued",
    "messages",
  );
}

function reason(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
