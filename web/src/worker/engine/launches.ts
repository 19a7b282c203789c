import type { FunctionName } from "../../artifact/manifest.js";
import { TOP_LOGPROBS } from "../../format/constants.js";
import type { Backend, HostArray, Read } from "./backend.js";
import { StepInputs } from "./inputs.js";
import type { Request, TokenLogprobs } from "./request.js";
import { isPlainGreedy } from "./sampling.js";
import type { ScheduledStep } from "./scheduler.js";

/** A function and its size. */
export type Run = readonly [name: FunctionName, size: number];

/** A step that the device is running, and its results to read. */
export interface Flight {
  readonly step: ScheduledStep;
  readonly logprobs: boolean;
  readonly results: Promise<HostArray[]>;
}

/** Gives steps to one backend: the functions that a step needs, its inputs, and the reads of its results. */
export class Launches {
  readonly #inputs: StepInputs;

  constructor(private readonly backend: Backend) {
    this.#inputs = new StepInputs(backend);
  }

  /** Forgets the backend's inputs, because another writer has changed them. */
  forget(): void {
    this.#inputs.forget();
  }

  /** The functions of a step with their sizes, in order. */
  runsOf({ bucket, sampled }: ScheduledStep): Run[] {
    const runs: Run[] = [["step", bucket.size]];
    if (sampled.length === 0 || this.backend.shape.embedding) return runs;
    const name = sampled.some((request) => this.needs(request, "sample")) ? "sample" : "greedy";
    runs.push([name, this.#sizeFor(name, sampled.length)]);
    if (sampled.some((request) => this.needs(request, "logprobs")))
      runs.push(["logprobs", this.#sizeFor("logprobs", sampled.length)]);
    return runs;
  }

  /** The runs whose functions have kernels that are not compiled yet. */
  unready(runs: readonly Run[]): Run[] {
    return runs.filter(([name, size]) => this.backend.missing(name, size) > 0);
  }

  /** The number of kernels of the functions that are not compiled yet. */
  missing(runs: readonly Run[]): number {
    return runs.reduce((sum, [name, size]) => sum + this.backend.missing(name, size), 0);
  }

  /** Whether a step with this request alone would need the function. */
  needs({ params, constraint, scored }: Request, name: FunctionName): boolean {
    if (scored) return name === "step";
    if (name === "logprobs") return params.logprobs !== null;
    if (name === "sample") return !!constraint || !isPlainGreedy(params);
    return true;
  }

  /**
   * Compiles the functions' kernels and waits for one of the functions; calls `onRefused` with each function
   * that the device cannot run.
   */
  prepareOne(runs: readonly Run[], onRefused: (name: FunctionName) => void): Promise<void> {
    return new Promise<void>((resolve, reject) => {
      const all = runs.map(([name, size]) =>
        this.backend.prepare(name, size, resolve).catch((error: unknown) => {
          onRefused(name);
          throw error;
        }),
      );
      Promise.all(all).then(() => resolve(), reject);
    });
  }

  launch(step: ScheduledStep, runs: readonly Run[]): Flight {
    const { backend } = this;
    this.#inputs.writeStep(step);
    const sampler = runs[1];
    if (sampler) this.#inputs.writeSampling(step, sampler[1], sampler[0] === "greedy");
    for (const [name, size] of runs) backend.run(name, size);
    const logprobs = runs.length > 2;
    // The results of a step that samples nothing are read too, which limits the number of queued prefill
    // steps.
    const rows = Math.max(step.sampled.length, 1);
    const { embedding, vocabSize } = backend.shape;
    const reads = embedding
      ? [{ buffer: "embedding", count: rows * embedding } as const]
      : readsOf(rows, logprobs);
    if (step.scored.length > 0)
      reads.push({ buffer: "logits", count: (step.sampled.length + step.scored.length) * vocabSize });
    const results = backend.fetch(reads);
    // Results are awaited in order; after an earlier failure, the failure of this one is not news.
    results.catch(() => undefined);
    return { step, logprobs, results };
  }

  #sizeFor(name: "greedy" | "sample" | "logprobs", rows: number): number {
    const size = this.backend.sizes(name).find((candidate) => candidate >= rows);
    if (size === undefined) throw new Error(`the artifact has no plan of ${name} for ${rows} rows`);
    return size;
  }
}

function readsOf(rows: number, logprobs: boolean): Read[] {
  const sampled: Read = { buffer: "sampled", count: rows };
  if (!logprobs) return [sampled];
  return [
    sampled,
    { buffer: "logprob", count: rows },
    { buffer: "top_ids", count: rows * TOP_LOGPROBS },
    { buffer: "top_logprobs", count: rows * TOP_LOGPROBS },
  ];
}

/**
 * The log-probabilities of one row, from the reads of `readsOf` beside the tokens; `count` is the number of
 * alternatives.
 */
export function logprobsOf([logprob, ids, values]: HostArray[], row: number, count: number): TokenLogprobs {
  const top = Array.from({ length: count }, (_, i) => {
    const at = row * TOP_LOGPROBS + i;
    return { token: ids?.[at] ?? 0, logprob: values?.[at] ?? 0 };
  });
  return { logprob: logprob?.[row] ?? 0, top };
}
