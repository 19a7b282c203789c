import { RequestError } from "../../protocol/errors.js";
import type { LaunchCost, ProfileOptions, StepProfile } from "../../protocol/messages.js";
import { Window } from "../cache/window.js";
import type { Backend } from "./backend.js";
import { writePlainStep } from "./inputs.js";

/** The default number of positions in the cache: enough for attention to cost noticeable time. */
const CONTEXT = 1024;
const ROUNDS = 10;

/** A backend that can time the launches of a plan. */
export interface TimedBackend extends Backend {
  /** Throws DeviceError if the browser cannot measure the time of a launch. */
  checkTimes(): void;
  /** Milliseconds of each launch, in order; rejects as `fetch` does. */
  profile(name: "step", size: number): Promise<number[]>;
  /** Each launch of a plan: its kernel, and the bytes of the weights that the launch reads as a whole. */
  launchesIn(name: "step", size: number): readonly Pick<LaunchCost, "kernel" | "weightBytes">[];
}

/**
 * Times the launches of a step on an idle device, with options from `checkedProfile`. It overwrites the first
 * pages of the cache.
 */
export async function profileStep(
  backend: TimedBackend,
  { rows, context, rounds }: Required<ProfileOptions>,
): Promise<Omit<StepProfile, "program">> {
  await backend.prepare("step", rows);
  writeInputs(backend, rows, context);
  const times: number[][] = [];
  const whole: number[] = [];
  await backend.profile("step", rows);
  const buffer = backend.shape.embedding ? "embedding" : "sampled";
  for (let round = 0; round < rounds; round++) {
    await backend.fetch([{ buffer, count: 1 }]);
    const begin = performance.now();
    backend.run("step", rows);
    await backend.fetch([{ buffer, count: 1 }]);
    whole.push(performance.now() - begin);
    times.push(await backend.profile("step", rows));
  }
  const launches = backend.launchesIn("step", rows).map((launch, i) => {
    return { ...launch, milliseconds: median(times.map((round) => round[i] ?? 0)) };
  });
  const total = launches.reduce((sum, { milliseconds }) => sum + milliseconds, 0);
  const costs = launches.map((launch): LaunchCost => {
    return { ...launch, share: total > 0 ? launch.milliseconds / total : 0 };
  });
  return { rows, context, rounds, stepMilliseconds: median(whole), launches: costs };
}

/**
 * Checks the options of a profile and fills in default values. Throws DeviceError if nothing can be timed,
 * and RequestError if the step cannot; `largest` is the number of rows of the largest step for which there is
 * memory.
 */
export function checkedProfile(
  backend: TimedBackend,
  options: ProfileOptions,
  largest: number,
): Required<ProfileOptions> {
  backend.checkTimes();
  const sizes = backend.sizes("step").filter((size) => size <= largest);
  const rows = options.rows ?? sizes[0] ?? 1;
  if (!sizes.includes(rows))
    throw new RequestError(`rows must be one of ${sizes.join(", ")}, not ${rows}.`, "rows");
  const most = mostContext(backend, rows);
  const context = options.context ?? Math.max(Math.min(CONTEXT, most), rows);
  if (!Number.isInteger(context) || context < rows || context > most)
    throw new RequestError(`context must be from ${rows} to ${most} tokens, not ${context}.`, "context");
  const rounds = options.rounds ?? ROUNDS;
  if (!Number.isInteger(rounds) || rounds < 1)
    throw new RequestError(`rounds must be at least 1, not ${rounds}.`, "rounds");
  return { rows, context, rounds };
}

/** The largest context of one sequence, alone in the cache, that advances by `rows` positions a step. */
function mostContext({ shape }: Backend, rows: number): number {
  const { groups, pageSize, contextLength } = shape;
  const longest = groups.map(({ window, stride, pages }) =>
    new Window(window, pageSize, stride ?? null).longest(pages, rows, contextLength),
  );
  return Math.min(contextLength, ...longest);
}

/**
 * Writes the inputs of a step over the last rows of one sequence, which has the first pages of the cache. A
 * group with a window has fewer pages than the context has columns: the columns then take its pages in turn.
 */
function writeInputs(backend: Backend, rows: number, context: number): void {
  const { groups, pageSize } = backend.shape;
  const columns = Math.ceil(context / pageSize);
  for (const [group, { pages }] of groups.entries()) {
    const table = Int32Array.from({ length: columns }, (_, column) => column % pages);
    backend.write(`page_table.${group}`, table);
  }
  writePlainStep(
    backend,
    Int32Array.from({ length: rows }, (_, row) => context - rows + row),
  );
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const upper = sorted[middle] ?? 0;
  return sorted.length % 2 === 1 ? upper : (upper + (sorted[middle - 1] ?? 0)) / 2;
}
