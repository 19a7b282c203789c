import { NEARNESS } from "../../format/constants.js";
import type { DeviceClass } from "../../protocol/backends.js";
import type { ChoiceReason } from "../../protocol/messages.js";

/**
 * Chooses which of an artifact's programs a GPU runs: among the programs made for its class, the fastest one.
 * edge_runtime/artifact/variants.py does the same; tests/vectors/variants tests both.
 */

/** The facts by which a program is chosen. */
export interface Candidate {
  readonly name: string;
  readonly deviceClass: DeviceClass | null;
}

const FINALISTS = 3;
/** The number of counted decode steps of each program; the quickest one is the program's time. */
const ROUNDS = 5;
/** After this many seconds of counted steps, no further round begins. */
const BUDGET = 1;
/** If a decode step takes this many seconds or more, there is no trial, because users would wait too long. */
const SLOW = 0.06;
/** A program replaces the first one if it costs at most this fraction of the first one's time. */
const GAIN = 0.95;
/**
 * Programs are compared by the cost of an answer with this many decoded tokens for each step of the largest
 * size.
 */
const TOKENS = 64;

export type StepKind = "decode" | "large";

/** The quickest steps of a program, in seconds. */
export type Seconds = Readonly<Partial<Record<StepKind, number>>>;

/** The program that runs, the reason for the choice, and the measured times of each program. */
export interface TrialChoice {
  readonly program: string;
  readonly why: ChoiceReason;
  readonly seconds: ReadonlyMap<string, Seconds>;
}

/**
 * The finalists among the programs that a device can run: programs of the device's own class, then of the
 * nearest class that has any. The first one is taken if there is no trial. A program that lost the device
 * before is left out as long as there is another one.
 */
export function lineUp<C extends Candidate>(
  programs: readonly C[],
  deviceClass: DeviceClass,
  lost: readonly string[] = [],
): readonly C[] {
  const well = programs.filter(({ name }) => !lost.includes(name));
  const near: readonly DeviceClass[] = NEARNESS[deviceClass];
  const place = (program: C): number => near.indexOf(program.deviceClass ?? "software");
  const left = (well.length > 0 ? well : [...programs]).sort((a, b) => place(a) - place(b));
  const classes = [...new Set(left.map((program) => program.deviceClass))].slice(0, 2);
  const most = deviceClass === "software" ? 1 : FINALISTS;
  return left.filter((program) => classes.includes(program.deviceClass)).slice(0, most);
}

/**
 * Times whole steps of the programs in turn and chooses one; the first one stays unless another is clearly
 * quicker. `measure` runs one step of a program and returns its seconds. A program's first step of a kind
 * compiles kernels, and is not counted.
 */
export async function compare(
  names: readonly string[],
  measure: (name: string, kind: StepKind) => Promise<number>,
): Promise<TrialChoice> {
  const best = new Map<string, Partial<Record<StepKind, number>>>(names.map((name) => [name, {}]));
  const [first = ""] = names;
  let spent = 0;
  /** Measures a step of each program in turn. */
  const round = async (kind: StepKind, counted = true): Promise<void> => {
    for (const [name, steps] of best) {
      const took = await measure(name, kind);
      if (!counted) continue;
      steps[kind] = Math.min(took, steps[kind] ?? took);
      spent += took;
    }
  };
  await round("decode", false);
  await round("decode");
  if (decodeOf(best.get(first)) > SLOW) return { program: first, why: "slow", seconds: best };
  for (const [name, steps] of [...best]) if (decodeOf(steps) > SLOW) best.delete(name);
  for (let i = 1; i < ROUNDS; i++) if (spent < BUDGET) await round("decode");
  if (spent < BUDGET) {
    await round("large", false);
    await round("large");
  }
  const cost = (name: string): number => TOKENS * decodeOf(best.get(name)) + (best.get(name)?.large ?? 0);
  const quickest = [...best.keys()].reduce((a, b) => (cost(b) < cost(a) ? b : a));
  const program = cost(quickest) <= GAIN * cost(first) ? quickest : first;
  return { program, why: "timed", seconds: best };
}

function decodeOf(steps: Seconds | undefined): number {
  return steps?.decode ?? Number.POSITIVE_INFINITY;
}
