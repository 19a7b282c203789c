import type { Follow } from "./follow.js";
import type { FromGrammars, GrammarPort } from "./words.js";

export type { Follow };

/**
 * Follows grammars in this thread where no worker is possible. The thread is blocked meanwhile, and a grammar
 * that takes too long cannot be ended.
 */
export function inThread(loading: Promise<Follow>): GrammarPort {
  let tell: (word: FromGrammars) => void = () => undefined;
  const following = loading.then((begin) => begin((word) => tell(word)));
  const failed = (error: unknown): void =>
    tell({
      type: "failed",
      message: error instanceof Error ? error.message : String(error),
      code: "unreachable",
    });
  return {
    post: (word) => void following.then((answer) => answer(word), failed),
    listen: (onWord) => {
      tell = onWord;
    },
    end: () => {
      tell = () => undefined;
    },
  };
}
