import type { Program } from "../../artifact/manifest.js";
import { abortReason, DeviceError, throwIfAborted } from "../../protocol/errors.js";
import type { Backend } from "../engine/backend.js";
import { writePlainStep } from "../engine/inputs.js";
import type { Kept } from "../store/kept.js";
import { type Choice, compare, type Kind } from "./variants.js";

/** Trials of programs on a GPU: whole steps, timed. The same as in edge_runtime/artifact/trial.py. */

/** Where a decode step of a trial stands in its sequence. */
export const POSITION = 255;

/** A device on which programs are tried beside one another. */
export interface TrialStage<E extends Backend = Backend> {
  /** Reads what the program is made of; rejects with ArtifactError where that cannot be had. */
  obtain(program: Program): Promise<void>;
  /** Puts a program there, with as little of a cache as a trial needs where it has no room yet. */
  put(program: Program): Promise<E>;
  /** The program as it will run, in place of what was there for the trial. */
  settle(program: Program): Promise<E>;
  /** Gives up what the program has there; the others stay. */
  drop(program: Program): Promise<void>;
  isLost(): Promise<boolean>;
  close(): void;
}

/** The first is the one to take without a trial. */
export type Finalists = readonly [Program, ...Program[]];

/** What came of a trial: a choice with its executor, or the program that failed and why. */
export type Outcome<E> =
  | { readonly choice: Choice; readonly executor: E }
  | { readonly failed: Program; readonly error: unknown };

/** One line-up of finalists, timed over one copy of the weights. */
export class Trial<E extends Backend> {
  /** The program under way. */
  #tried: Program;

  constructor(
    private readonly stage: TrialStage<E>,
    private readonly finalists: Finalists,
    private readonly kept: Kept,
    private readonly signal: AbortSignal,
    private readonly onTrying: (program: Program) => void,
  ) {
    [this.#tried] = finalists;
  }

  /**
   * Rejects when it is aborted, and only then. A program that fails stays noted until somebody ends the note.
   */
  async run(): Promise<Outcome<E>> {
    const { finalists, kept, signal, stage } = this;
    try {
      const choice = await this.#compare();
      // What has no room must not be kept: it would be taken again at every load.
      const winner = finalists.find(({ name }) => name === choice.program) ?? finalists[0];
      this.#tried = winner;
      const executor = await unlessAborted(signal, stage.settle(winner));
      await kept.keep(
        finalists.map(({ name }) => name),
        choice.program,
      );
      return { choice, executor };
    } catch (error) {
      throwIfAborted(signal);
      return { failed: this.#tried, error };
    }
  }

  async #compare(): Promise<Choice> {
    const executors = new Map<Program, E>();
    for (const program of this.finalists) {
      await this.#begin(program);
      executors.set(program, await unlessAborted(this.signal, this.stage.put(program)));
    }
    const context = Math.min(...[...executors.values()].map(({ shape }) => shape.contextLength));
    const steps = new Map(
      [...executors].map(([program, executor]) => [
        program.name,
        [program, new Steps(program.name, executor, context)] as const,
      ]),
    );
    const told = new Set<Program>();
    return compare([...steps.keys()], async (name, kind) => {
      const found = steps.get(name);
      if (!found) throw new Error(`${name} is no finalist`);
      const [program, own] = found;
      await this.#begin(program);
      // Its first step compiles kernels, which takes longest.
      if (!told.has(program)) this.onTrying(program);
      told.add(program);
      return unlessAborted(this.signal, own.run(kind));
    });
  }

  /** Notes a program before anything of it runs: what takes the process down must be found noted. */
  async #begin(program: Program): Promise<void> {
    throwIfAborted(this.signal);
    this.#tried = program;
    await this.kept.trying(program.name);
  }
}

/** The result of `work`. Kernels take their time to compile: who aborts need not wait for them. */
export async function unlessAborted<T>(signal: AbortSignal, work: Promise<T>): Promise<T> {
  throwIfAborted(signal);
  let onAbort = (): void => undefined;
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(abortReason(signal));
    signal.addEventListener("abort", onAbort);
  });
  return Promise.race([work, aborted]).finally(() => signal.removeEventListener("abort", onAbort));
}

/**
 * Whole steps of one executor, timed until the host has the token. They leave no trace that a request could
 * see: page tables stay as they are, and what a cache holds beyond its pages' use does not count.
 */
export class Steps {
  readonly #sizes: Readonly<Record<Kind, number>>;
  readonly #rows: number;
  readonly #last: number;

  /** `context`: positions that the executor has room for. */
  constructor(
    private readonly program: string,
    private readonly executor: Backend,
    context: number,
  ) {
    const sizes = executor.sizes("step");
    this.#sizes = { decode: sizes[0] ?? 1, large: sizes.at(-1) ?? 1 };
    this.#rows = executor.sizes("greedy")[0] ?? 1;
    this.#last = Math.min(POSITION, context - 1);
  }

  /** Seconds of one step. */
  async run(kind: Kind): Promise<number> {
    const { executor } = this;
    const size = this.#sizes[kind];
    const { embedding } = executor.shape;
    const buffer = embedding ? "embedding" : "sampled";
    await Promise.all([
      executor.prepare("step", size),
      ...(embedding ? [] : [executor.prepare("greedy", this.#rows)]),
    ]);
    const at = (row: number): number => Math.min(kind === "large" ? row : POSITION, this.#last);
    writePlainStep(
      executor,
      Int32Array.from({ length: size }, (_, row) => at(row)),
    );
    // Nothing is under way when the clock starts.
    await executor.fetch([{ buffer, count: 1 }]);
    const begin = performance.now();
    executor.run("step", size);
    if (!embedding) executor.run("greedy", this.#rows);
    const [sampled] = await executor.fetch([{ buffer, count: 1 }]);
    const seconds = (performance.now() - begin) / 1000;
    // An embedding that is none is as bad as no token.
    this.#check(embedding ? (Number.isFinite(sampled?.[0]) ? 0 : -1) : sampled?.[0]);
    return seconds;
  }

  #check(token = -1): void {
    const { vocabSize } = this.executor.shape;
    if (token < 0 || token >= vocabSize)
      throw new DeviceError(
        `A step of ${this.program} gave the token ${token}: its logits are not finite, or not of the ` +
          `${vocabSize} tokens that there are.`,
      );
  }
}
