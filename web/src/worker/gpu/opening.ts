import type { Program } from "../../artifact/manifest.js";
import type { DeviceClass } from "../../protocol/backends.js";
import { throwIfAborted, UnreachableError } from "../../protocol/errors.js";
import type { Backend } from "../engine/backend.js";
import type { Kept } from "../store/kept.js";
import { type Finalists, Trial, type TrialStage, unlessAborted } from "./trial.js";
import { lineUp, type TrialChoice } from "./variants.js";

/**
 * Opens an artifact on a GPU with the program that will run; the first load tries the finalists. A program
 * that fails is passed over, and the next ones are tried.
 */

export interface OpeningHooks {
  readonly signal: AbortSignal;
  readonly onTrying: (program: Program) => void;
  readonly onChoice: (program: Program, choice: TrialChoice) => void;
  /** A program that was worth a try failed, or its files cannot be loaded. */
  readonly onPassedOver: (program: Program, error: unknown) => void;
}

/** The program that runs, its executor, and the stage that they run on. */
export interface Opened<S, E> {
  readonly stage: S;
  readonly executor: E;
  readonly program: Program;
  readonly choice: TrialChoice;
}

/**
 * The choice on a GPU without alternatives: no program is tried, and no notes are read. Null if there are
 * alternatives.
 */
export function settled(able: Finalists, deviceClass: DeviceClass, pinned: boolean): TrialChoice | null {
  const [first = able[0]] = lineUp(able, deviceClass);
  if (pinned) return untimed(first.name, "pinned");
  if (able.length === 1) return untimed(first.name, "only");
  return deviceClass === "software" ? untimed(first.name, "software") : null;
}

/** The choice if no trial is needed, or null. If all programs have failed, the first one is chosen. */
export function known(
  names: readonly string[],
  kept: Pick<Kept, "lost" | "busy" | "chosen">,
  failed: ReadonlySet<string> = new Set(),
): TrialChoice | null {
  const [first = ""] = names;
  const spoilt = names.some((name) => kept.lost.includes(name) || failed.has(name));
  if (names.length === 1 || spoilt) return untimed(first, "only");
  const before = kept.chosen(names);
  if (before !== null) return untimed(before, "kept");
  return kept.busy ? untimed(first, "busy") : null;
}

function untimed(program: string, why: TrialChoice["why"]): TrialChoice {
  return { program, why, seconds: new Map() };
}

/**
 * Opens the program that suits the device best among `able`. `open` gives a stage with the weights, whose
 * device can run all of `able`; its argument `first` is the program that will run, or that is tried first.
 */
export async function openBest<E extends Backend, S extends TrialStage<E>>(
  able: Finalists,
  deviceClass: DeviceClass,
  kept: Kept,
  open: (first: Program, tried: readonly Program[]) => Promise<S>,
  hooks: OpeningHooks,
): Promise<Opened<S, E>> {
  const opening = new Opening<E, S>(able, deviceClass, kept, open, hooks);
  try {
    for (;;) {
      const opened = await opening.next();
      if (opened) return opened;
    }
  } catch (error) {
    await opening.giveUp();
    throw error;
  }
}

class Opening<E extends Backend, S extends TrialStage<E>> {
  #stage: S | null = null;
  /** Errors of programs that are not tried again at this load. */
  readonly #failed = new Map<string, unknown>();
  /** Programs that also failed when they ran alone. */
  readonly #spent = new Set<string>();

  constructor(
    private readonly able: Finalists,
    private readonly deviceClass: DeviceClass,
    private readonly kept: Kept,
    private readonly open: (first: Program, tried: readonly Program[]) => Promise<S>,
    private readonly hooks: OpeningHooks,
  ) {}

  /** Makes one choice or one trial. Returns null if a program failed: the others are then lined up again. */
  async next(): Promise<Opened<S, E> | null> {
    throwIfAborted(this.hooks.signal);
    const finalists = this.#lineUp();
    const choice = known(
      finalists.map(({ name }) => name),
      this.kept,
      new Set(this.#failed.keys()),
    );
    return choice ? this.#take(finalists, this.#explained(choice)) : this.#try(finalists);
  }

  /** Closes the stage, and ends the note of a trial. */
  async giveUp(): Promise<void> {
    this.#stage?.close();
    this.#stage = null;
    await this.kept.stop();
  }

  #lineUp(): Finalists {
    const { able, kept } = this;
    const left = able.filter(({ name }) => !this.#spent.has(name));
    const isWell = left.some(({ name }) => !kept.lost.includes(name));
    // A program that lost the device before is tried last, and not at all if other programs failed.
    if (this.#spent.size > 0 && !isWell) throw [...this.#failed.values()][0];
    const [first = able[0], ...others] = lineUp(left, this.deviceClass, [
      ...kept.lost,
      ...this.#failed.keys(),
    ]);
    return [first, ...others];
  }

  /** If programs are missing only because of their files, a later load may have a choice. */
  #explained(choice: TrialChoice): TrialChoice {
    const absent = [...this.#failed.values()].some((error) => error instanceof UnreachableError);
    return choice.why === "only" && absent ? { ...choice, why: "offline" } : choice;
  }

  /** Runs the chosen program without a trial. */
  async #take(finalists: Finalists, choice: TrialChoice): Promise<Opened<S, E> | null> {
    const program = named(finalists, choice.program);
    this.hooks.onChoice(program, choice);
    this.#stage ??= await this.open(program, []);
    const stage = this.#stage;
    try {
      const executor = await unlessAborted(this.hooks.signal, stage.settle(program));
      return { stage, executor, program, choice };
    } catch (error) {
      throwIfAborted(this.hooks.signal);
      // Without a trial, any program may be the cause.
      if (await stage.isLost()) throw error;
      this.#spent.add(program.name);
      await this.#passOver(program, error);
      return null;
    }
  }

  async #try(finalists: Finalists): Promise<Opened<S, E> | null> {
    this.#stage ??= await this.open(finalists[0], finalists);
    const stage = this.#stage;
    if (!(await this.#obtain(stage, finalists))) return null;
    const { kept, hooks } = this;
    const outcome = await new Trial(stage, finalists, kept, hooks.signal, hooks.onTrying).run();
    if ("failed" in outcome) {
      const { failed, error } = outcome;
      // A loss of the device is recorded. A lack of memory is not, because the next load may have more.
      if (await stage.isLost()) {
        await kept.lose(failed.name);
        this.#stage = null;
        stage.close();
      } else await kept.stop();
      await this.#passOver(failed, error);
      return null;
    }
    const { choice, executor } = outcome;
    const program = named(finalists, choice.program);
    hooks.onChoice(program, choice);
    return { stage, executor, program, choice };
  }

  /**
   * Whether the files of all finalists can be loaded: an offline visit has the files of the program that ran
   * last, and little more.
   */
  async #obtain(stage: S, finalists: Finalists): Promise<boolean> {
    const { signal } = this.hooks;
    const had = await unlessAborted(
      signal,
      Promise.allSettled(finalists.map((program) => stage.obtain(program))),
    );
    throwIfAborted(signal);
    for (const [i, result] of had.entries()) {
      const program = finalists[i];
      if (!program || result.status === "fulfilled") continue;
      this.#spent.add(program.name);
      await this.#passOver(program, result.reason);
    }
    return had.every(({ status }) => status === "fulfilled");
  }

  async #passOver(program: Program, error: unknown): Promise<void> {
    this.#failed.set(program.name, error);
    this.hooks.onPassedOver(program, error);
    await this.#stage?.drop(program);
  }
}

function named(finalists: Finalists, name: string): Program {
  return finalists.find((program) => program.name === name) ?? finalists[0];
}
