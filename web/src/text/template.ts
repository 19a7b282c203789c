/** Chat templates: Jinja, rendered by @huggingface/jinja with the variables that transformers gives. */

import { Template } from "@huggingface/jinja";
import { ArtifactError, RequestError } from "../errors.js";
import type { ChatMessage } from "./types.js";

export class ChatTemplate {
  readonly #template: Template;
  readonly #tokens: Readonly<Record<string, string>>;

  constructor(source: string, tokens: Readonly<Record<string, string>>) {
    try {
      this.#template = new Template(source);
    } catch (error) {
      throw new ArtifactError(`the model's chat template cannot be parsed: ${reason(error)}`, { cause: error });
    }
    this.#tokens = tokens;
  }

  render(messages: readonly ChatMessage[], addGenerationPrompt: boolean): string {
    try {
      return this.#template.render({ ...this.#tokens, messages, add_generation_prompt: addGenerationPrompt });
    } catch (error) {
      // Templates refuse conversations on purpose, for instance two user turns in a row; their words say why.
      throw new RequestError(`the model's chat template refused the messages: ${reason(error)}`, "messages", {
        cause: error,
      });
    }
  }
}

function reason(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
