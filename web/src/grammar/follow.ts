/** The entry of a worker that follows grammars; its code is loaded at the first message. */

import type { FromGrammars, ToGrammars } from "./words.js";

/** Answers messages in order; `tell` receives the answers. */
export type Follow = (tell: (word: FromGrammars) => void) => (word: ToGrammars) => void;

/**
 * A class with a method that answers a message, or returns null for a message without an answer: `Follower`.
 */
type Answering = new () => { answer(word: ToGrammars): Promise<FromGrammars | null> };

export function followWith(load: () => Promise<{ readonly Follower: Answering }>): Follow {
  return (tell) => {
    const follower = load().then(({ Follower }) => new Follower());
    // An error of loading is told in the answer to the first message.
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
