import { abortError, DeviceError, throwIfAborted } from "../../both/errors.js";
import { MAX_ROWS, SAMPLE_COLUMNS, SAMPLE_I32 } from "../../both/format.js";
import type { DeviceClass, Program } from "../../both/manifest.js";
import type { Backend } from "../engine/backend.js";
import type { Kept } from "../store/kept.js";
import { type Choice, compare, type Kind, lineUp } from "./variants.js";

/**
 * Puts an artifact on a GPU with the program that is to run: the finalists are tried at the first load. The
 * same as edge_runtime/artifact/trial.py.
 */

/** Where a decode step of a trial stands in its sequence. */
export const POSITION = 255;

/** A device on which programs are tried beside one another. */
export interface TrialStage {
  /** Puts a program there, with as little of a cache as a trial needs where it is not the first. */
  put(program: Program): Promise<Backend>;
  /** Room for the program as it will run, in place of what was there for the trial. */
  makeRoom(program: Program): Promise<void>;
  isLost(): Promise<boolean>;
  close(): void;
}

export interface TrialHooks {
  readonly signal: AbortSignal;
  readonly onTrying: (program: Program) => void;
  readonly onChoice: (program: Program, choice: Choice) => void;
}

/** The first is the one to take without a trial. */
export type Finalists = readonly [Program, ...Program[]];

/** What runs in the end, and where. */
export interface Opened<S> {
  readonly stage: S;
  readonly program: Program;
  readonly choice: Choice;
}

/** The choice where a GPU has none, or none is left to it: nothing is tried, and no notes are read. */
export function settled(able: Finalists, deviceClass: DeviceClass, pinned: boolean): Choice | null {
  const [first = able[0]] = lineUp(able, deviceClass);
  if (pinned) return untimed(first.name, "pinned");
  if (able.length === 1) return untimed(first.name, "only");
  return deviceClass === "software" ? untimed(first.name, "software") : null;
}

/**
 * The program that suits the device best of those that it can run. `open` gives a stage whose device can run
 * all of the programs, with the first as it will run.
 */
export async function openBest<S extends TrialStage>(
  able: Finalists,
  deviceClass: DeviceClass,
  kept: Kept,
  open: (finalists: Finalists) => Promise<S>,
  hooks: TrialHooks,
): Promise<Opened<S>> {
  const failed = new Set<string>();
  for (;;) {
    const [first = able[0], ...others] = lineUp(able, deviceClass, [...kept.lost, ...failed]);
    const finalists: Finalists = [first, ...others];
    const of = (name: string): Program => finalists.find((program) => program.name === name) ?? first;
    const choice = known(
      finalists.map(({ name }) => name),
      kept,
      failed,
    );
    if (choice) {
      const program = of(choice.program);
      hooks.onChoice(program, choice);
      return { stage: await open([program]), program, choice };
    }
    const stage = await open(finalists);
    const tried = await new Trial(stage, finalists, kept, hooks).run(failed);
    if (!tried) continue;
    const program = of(tried.program);
    hooks.onChoice(program, tried);
    return { stage, program, choice: tried };
  }
}

/** The choice where nothing has to be tried for it. Where all have failed, the first must do. */
export function known(
  names: readonly string[],
  kept: Pick<Kept, "lost" | "busy" | "chosen">,
  failed: ReadonlySet<string> = new Set(),
): Choice | null {
  const [first = ""] = names;
  const spoilt = names.some((name) => kept.lost.includes(name) || failed.has(name));
  if (names.length === 1 || spoilt) return untimed(first, "only");
  const before = kept.chosen(names);
  if (before !== null) return untimed(before, "kept");
  return kept.busy ? untimed(first, "busy") : null;
}

function untimed(program: string, why: Choice["why"]): Choice {
  return { program, why, seconds: new Map() };
}

/** One line-up of finalists, timed over one copy of the weights. */
class Trial {
  /** The program under way. */
  #tried: Program;

  constructor(
    private readonly stage: TrialStage,
    private readonly finalists: Finalists,
    private readonly kept: Kept,
    private readonly hooks: TrialHooks,
  ) {
    [this.#tried] = finalists;
  }

  /**
   * What came of it. Null where one of the programs failed: it is added to `failed`, the stage is closed, and
   * the others are to be lined up anew. That it lost the device is kept; that it had no room may be otherwise
   * the next time.
   */
  async run(failed: Set<string>): Promise<Choice | null> {
    const { stage, kept } = this;
    try {
      const choice = await this.#compare();
      // What has no room must not be kept: it would be taken again at every load.
      const winner = this.finalists.find(({ name }) => name === choice.program) ?? this.finalists[0];
      this.#tried = winner;
      await unlessAborted(this.hooks.signal, stage.makeRoom(winner));
      await kept.keep(
        this.finalists.map(({ name }) => name),
        choice.program,
      );
      return choice;
    } catch (error) {
      const isDevices = error instanceof DeviceError;
      failed.add(this.#tried.name);
      if (isDevices && (await stage.isLost())) await kept.lose(this.#tried.name);
      else await kept.stop();
      stage.close();
      if (isDevices) return null;
      throw error;
    }
  }

  async #compare(): Promise<Choice> {
    const executors = new Map<Program, Backend>();
    for (const program of this.finalists) {
      await this.#begin(program);
      executors.set(program, await unlessAborted(this.hooks.signal, this.stage.put(program)));
    }
    const context = Math.min(...[...executors.values()].map(({ shape }) => shape.contextLength));
    const steps = new Map(
      [...executors].map(([program, executor]) => [
        program.name,
        [program, new Steps(executor, context)] as const,
      ]),
    );
    const told = new Set<Program>();
    return compare([...steps.keys()], async (name, kind) => {
      const found = steps.get(name);
      if (!found) throw new Error(`${name} is no finalist`);
      const [program, own] = found;
      await this.#begin(program);
      // Its first step compiles kernels, which takes longest.
      if (!told.has(program)) this.hooks.onTrying(program);
      told.add(program);
      return unlessAborted(this.hooks.signal, own.run(kind));
    });
  }

  /** Notes a program before anything of it runs: what takes the process down must be found noted. */
  async #begin(program: Program): Promise<void> {
    throwIfAborted(this.hooks.signal);
    this.#tried = program;
    await this.kept.trying(program.name);
  }
}

/** The result of `work`. Kernels take their time to compile: who aborts need not wait for them. */
async function unlessAborted<T>(signal: AbortSignal, work: Promise<T>): Promise<T> {
  throwIfAborted(signal);
  let onAbort = (): void => undefined;
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(abortError());
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
    await Promise.all([executor.prepare("step", size), executor.prepare("greedy", this.#rows)]);
    this.#write(kind, size);
    // Nothing is under way when the clock starts.
    await executor.fetch([{ buffer: "sampled", count: 1 }]);
    const begin = performance.now();
    executor.run("step", size);
    executor.run("greedy", this.#rows);
    await executor.fetch([{ buffer: "sampled", count: 1 }]);
    return (performance.now() - begin) / 1000;
  }

  #write(kind: Kind, size: number): void {
    const { executor } = this;
    const at = (row: number): number => Math.min(kind === "large" ? row : POSITION, this.#last);
    const sample = new Int32Array(MAX_ROWS * SAMPLE_COLUMNS);
    for (let row = 0; row < MAX_ROWS; row++) sample[row * SAMPLE_COLUMNS + SAMPLE_I32.feed] = -1;
    executor.write("tokens", new Int32Array(size));
    executor.write(
      "positions",
      Int32Array.from({ length: size }, (_, row) => at(row)),
    );
    executor.write("slots", new Int32Array(size));
    executor.write("logit_rows", new Int32Array(MAX_ROWS));
    executor.write("sample_i32", sample);
  }
}
