/**
 * Where @huggingface/tokenizers 0.2.0 splits text differently from the Rust tokenizers that the models were
 * trained with. Found by tests/unit/test_tokenizer_parity.py; when that passes without a fix, the fix can go.
 */

import {
  ByteLevelPreTokenizer,
  DigitsPreTokenizer,
  type PreTokenizer,
  SequencePreTokenizer,
  type Tokenizer,
} from "@huggingface/tokenizers";
import { isObject, type JsonObject } from "./tokenizer-file.js";

// The library's pattern uses JavaScript's \s, which holds U+FEFF and lacks U+0085; Unicode's White_Space is
// meant.
const GPT2_WORDS =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** Repairs a tokenizer in place. */
export function fixPreTokenizers(tokenizer: Tokenizer): void {
  if (tokenizer.pre_tokenizer !== null) fix(tokenizer.pre_tokenizer);
}

function fix(step: PreTokenizer): void {
  if (step instanceof SequencePreTokenizer) {
    for (const inner of step.tokenizers) if (inner !== null) fix(inner);
  } else if (step instanceof ByteLevelPreTokenizer) {
    step.pattern = GPT2_WORDS;
  } else if (step instanceof DigitsPreTokenizer) {
    // The library takes ASCII digits only; Rust's `is_numeric` takes every numeric character, such as ² and
    // Ⅷ.
    step.pattern = step.config.individual_digits ? /\P{N}+|\p{N}/gu : /\P{N}+|\p{N}+/gu;
  }
}

/**
 * The library ignores Metaspace's `split` (true by default) and leaves the text in one piece, so that merges
 * may cross words. A Split after it restores the borders: each ▁ begins a piece.
 */
export function withMetaspaceSplit(tokenizer: JsonObject): JsonObject {
  return { ...tokenizer, pre_tokenizer: splitMetaspace(tokenizer.pre_tokenizer) };
}

function splitMetaspace(step: unknown): unknown {
  if (!isObject(step)) return step;
  if (step.type === "Sequence" && Array.isArray(step.pretokenizers)) {
    return { ...step, pretokenizers: step.pretokenizers.map(splitMetaspace) };
  }
  if (step.type !== "Metaspace" || step.split === false) return step;
  const mark = typeof step.replacement === "string" ? step.replacement : "▁";
  const pieces = {
    type: "Split",
    pattern: { Regex: `${mark}[^${mark}]*|[^${mark}]+` },
    behavior: "Removed",
    invert: true,
  };
  return { type: "Sequence", pretokenizers: [step, pieces] };
}
