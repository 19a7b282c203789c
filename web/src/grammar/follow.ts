/** A worker's life as the one that follows grammars: what it needs comes with the first word. */

import type { FromGrammars, ToGrammars } from "./words.js";

/** Answers words in the order in which they come; `load` loads what does so. */
export type Follow = (tell: (word: FromGrammars) => void) => (word: ToGrammars) => void;

/** What answers a word, or has no answer to it: `Follower`. */
type Answering = new () => { answer(word: ToGrammars): Promise<FromGrammars | null> };

export function followWith(load: () => Promise<{ readonly Follower: Answering }>): Follow {
  return (tell) => {
    const follower = load().then(({ Follower }) => new Follower());
    // The first word hears of it.
    follower.catch(() => undefined);
    let turn = Promise.resolve();
    return (word) => {
      turn = turn
        .then(async () => (await follower).answer(word))
        .catch((error): FromGrammars => {
          const message = error instanceof Error ? error.message : String(error);
          return { type: "failed", message, code: "unreachable" };
        })
        .then((answer) => {
          if (answer) tell(answer);
        });
    };
  };
}
