/** Messages between the engine's worker and the grammars' worker, and their answers. */

import type { Grammar } from "../protocol/grammar.js";

/** The name of a worker that follows grammars. */
export const GRAMMARS = "nearfar grammars";

export type ToGrammars =
  /**
   * The first message: each token's bytes, as byte-level tokenizers write them ("" for a token without text),
   * and the tokens that end an answer.
   */
  | { readonly type: "vocabulary"; readonly pieces: readonly string[]; readonly ends: readonly number[] }
  /**
   * An answer begins, or continues after `tokens`. `ignoreEos` says that it ends only if nothing else is
   * allowed.
   */
  | {
      readonly type: "start";
      readonly id: number;
      readonly grammar: Grammar;
      readonly ignoreEos: boolean;
      readonly tokens: readonly number[];
    }
  | { readonly type: "accept"; readonly id: number; readonly token: number }
  /** The answer has ended. Only this message has no answer. */
  | { readonly type: "close"; readonly id: number };

export type FromGrammars =
  | { readonly type: "ready" }
  /** uint32 [ceil(vocab / 32)]: bit v % 32 of word v / 32 says whether token v may come next. */
  | { readonly type: "allowed"; readonly words: Uint32Array<ArrayBuffer> }
  /** Nothing can follow the tokens. */
  | { readonly type: "complete" }
  /**
   * The library rejected the grammar. `broken` says that the library has aborted and this worker must not be
   * used again.
   */
  | { readonly type: "refused"; readonly message: string; readonly broken: boolean }
  /** No grammar can be followed here, because the library cannot be loaded or is not allowed to run. */
  | { readonly type: "failed"; readonly message: string; readonly code: "unreachable" | "unsupported" };

/** A worker of the grammars, as seen by the engine's worker. */
export interface GrammarPort {
  post(word: ToGrammars): void;
  listen(onWord: (word: FromGrammars) => void): void;
  end(): void;
}
