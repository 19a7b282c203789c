/** A worker's life as the one that follows grammars: what it needs comes with the first word. */

import type { FromGrammars, ToGrammars } from "./words.js";

/** Answers words in the order in which they come. */
export function follow(tell: (word: FromGrammars) => void): (word: ToGrammars) => void {
  const follower = import("./index.js").then(({ Follower }) => new Follower());
  let turn = Promise.resolve();
  return (word) => {
    turn = turn
      .then(async () => (await follower).answer(word))
      .catch((error): FromGrammars => {
        const message = `its code cannot be loaded (${error instanceof Error ? error.message : error})`;
        return { type: "failed", message, code: "unreachable" };
      })
      .then((answer) => {
        if (answer) tell(answer);
      });
  };
}
