/** The grammars of one model's answers; what follows them comes with the first that is asked for. */

import { RequestError } from "../both/errors.js";
import type { Grammar } from "../both/grammar.js";
import type { Constraint } from "./engine/request.js";
import type { Grammars, Vocabulary } from "./grammars.js";
import type { Host } from "./host.js";

export class Constraints {
  #grammars: Promise<Grammars> | null = null;

  constructor(
    private readonly start: Host["grammars"],
    private readonly vocabulary: Vocabulary,
  ) {}

  /**
   * So many answers at the start of a grammar; the worker that follows it is started by the first. Rejects with
   * the reason of `signal`, which ends a grammar that nobody waits for any more.
   */
  async follow(
    grammar: Grammar,
    count: number,
    signal: AbortSignal,
    ignoreEos: boolean,
  ): Promise<Constraint[]> {
    this.#grammars ??= import("./grammars.js").then(
      ({ Grammars }) => new Grammars(this.start, this.vocabulary),
      (error) => {
        this.#grammars = null;
        throw new RequestError(`response_format: its code cannot be loaded (${error})`, "response_format", {
          code: "unreachable",
        });
      },
    );
    const followed = await this.#grammars;
    const one = (): Promise<Constraint> => followed.follow(grammar, signal, ignoreEos);
    const first = await one();
    return [first, ...(await Promise.all(Array.from({ length: count - 1 }, one)))];
  }

  /** Ends the worker, if there is one. */
  end(): void {
    void this.#grammars?.then((grammars) => grammars.end()).catch(() => undefined);
  }
}
