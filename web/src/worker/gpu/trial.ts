import type { Program } from "../../artifact/manifest.js";
import { abortReason, DeviceError, throwIfAborted } from "../../protocol/errors.js";
import type { Backend } from "../engine/backend.js";
import { writePlainStep } from "../engine/inputs.js";
import type { Kept } from "../store/kept.js";
import { compare, type StepKind, type TrialChoice } from "./variants.js";

/** Tries programs on a GPU by timing whole steps. edge_runtime/artifact/trial.py does the same. */

/** The position of a trial's decode step in its sequence. */
export const POSITION = 255;

/** A device on which several programs are tried. */
export interface TrialStage<E extends Backend = Backend> {
  /** Loads the program's files; rejects with ArtifactError if one cannot be had. */
  obtain(program: Program): Promise<void>;
  /**
   * Prepares a program for a trial. If there is no memory for it yet, it gets the smallest cache that a trial
   * needs.
   */
  put(program: Program): Promise<E>;
  /** Prepares a program as it will run, and frees what the trial used. */
  settle(program: Program): Promise<E>;
  /** Frees the program's memory; other programs stay. */
  drop(program: Program): Promise<void>;
  isLost(): Promise<boolean>;
  close(): void;
}

/** The programs to try. The first one is taken if there is no trial. */
export type Finalists = readonly [Program, ...Program[]];

/** The result of a trial: a choice with its executor, or the program that failed and its error. */
export type Outcome<E> =
  | { readonly choice: TrialChoice; readonly executor: E }
  | { readonly failed: Program; readonly error: unknown };

/** One trial of the finalists, timed over one copy of the weights. */
export class Trial<E extends Backend> {
  /** The program that is being tried. */
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
   * Runs the trial. Rejects only if it is aborted. The note about a program that failed stays until the
   * caller ends it.
   */
  async run(): Promise<Outcome<E>> {
    const { finalists, kept, signal, stage } = this;
    try {
      const choice = await this.#compare();
      // The choice is recorded after the program has its memory, because a program without memory would
      // otherwise be chosen at every load.
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

  async #compare(): Promise<TrialChoice> {
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
      if (!found) throw new Error(`${name} is not a finalist`);
      const [program, own] = found;
      await this.#begin(program);
      // The first step of a program compiles its kernels, which takes longest.
      if (!told.has(program)) this.onTrying(program);
      told.add(program);
      return unlessAborted(this.signal, own.run(kind));
    });
  }

  /**
   * Notes a program before any of its code runs, so that the note exists if the program takes the process
   * down.
   */
  async #begin(program: Program): Promise<void> {
    throwIfAborted(this.signal);
    this.#tried = program;
    await this.kept.trying(program.name);
  }
}

/** The result of `work`, or a rejection at once if the signal aborts: compiling kernels takes a while. */
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
 * Times whole steps of one executor, until the host has the token. The steps leave no trace that a request
 * could see: page tables stay as they are, and no request reads cache contents outside of its pages.
 */
export class Steps {
  readonly #sizes: Readonly<Record<StepKind, number>>;
  readonly #rows: number;
  readonly #last: number;

  /** `context` is the number of positions for which the executor has room. */
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

  /** Runs one step and returns its seconds. */
  async run(kind: StepKind): Promise<number> {
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
    // All earlier work is done when the clock starts.
    await executor.fetch([{ buffer, count: 1 }]);
    const begin = performance.now();
    executor.run("step", size);
    if (!embedding) executor.run("greedy", this.#rows);
    const [sampled] = await executor.fetch([{ buffer, count: 1 }]);
    const seconds = (performance.now() - begin) / 1000;
    // An embedding that is not finite counts as an invalid token.
    this.#check(embedding ? (Number.isFinite(sampled?.[0]) ? 0 : -1) : sampled?.[0]);
    return seconds;
  }

  #check(token = -1): void {
    const { vocabSize } = this.executor.shape;
    if (token < 0 || token >= vocabSize)
      throw new DeviceError(
        `A step of ${this.program} gave the token ${token}: its logits are not finite, or not of the ` +
          `${vocabSize} tokens of the vocabulary.`,
      );
  }
}
