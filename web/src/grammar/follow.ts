/** The entry of a worker that follows grammars; its code is loaded at the first message. */

import type { FromGrammars, ToGrammars } from "./words.js";

/** Answers messages in their order; `load` loads the code for that. */
export type Follow = (tell: (word: FromGrammars) => void) => (word: ToGrammars) => void;

/** A class that answers a message, or has no answer to it: `Follower`. */
type Answering = new () => { answer(word: ToGrammars): Promise<FromGrammars | null> };

export function followWith(load: () => Promise<{ readonly Follower: Answering }>): Follow {
  return (tell) => {
    const follower = load().then(({ Follower }) => new Follower());
    // The first message gets the error.
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
