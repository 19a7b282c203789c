import { RequestError } from "../../protocol/errors.js";
import type { Constraint } from "../engine/request.js";
import type { Asked } from "../prompts/prompts.js";
import type { TextCodec } from "../text/types.js";

/**
 * The tokens of labels as the continuation of a prompt: those that the tokenizer adds to its end. If it would
 * change the last tokens of the prompt, which an answer cannot, they are those of the label alone.
 */
export function labelTokens(codec: TextCodec, { end, opened }: Asked, labels: readonly string[]): number[][] {
  if (opened)
    throw new RequestError(
      "the chat template begins the answer with reasoning, so that no label can come first: turn it off, for " +
        "example with chat_template_kwargs: { enable_thinking: false }",
      "chat_template_kwargs",
    );
  const encode = (text: string): number[] => codec.encode(text, { addSpecialTokens: false });
  const start = encode(end);
  return labels.map((label) => {
    const whole = encode(end + label);
    const kept = whole.length > start.length && start.every((token, at) => whole[at] === token);
    return kept ? whole.slice(start.length) : encode(label);
  });
}

/** Makes an answer the given tokens, so that their log-probabilities are told. */
export class Forced implements Constraint {
  readonly #masks: Uint32Array<ArrayBuffer>[];

  constructor(tokens: readonly number[], vocabSize: number) {
    this.#masks = tokens.map((token) => {
      const mask = new Uint32Array(Math.ceil(vocabSize / 32));
      mask[token >>> 5] = 2 ** (token & 31);
      return mask;
    });
  }

  get allowed(): Uint32Array<ArrayBuffer> {
    return this.#masks[0] ?? new Uint32Array();
  }

  accept(): Promise<Uint32Array<ArrayBuffer> | null> {
    this.#masks.shift();
    return Promise.resolve(this.#masks[0] ?? null);
  }

  close(): void {
    this.#masks.length = 0;
  }
}
