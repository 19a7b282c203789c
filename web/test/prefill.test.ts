/** How prompts share the rows of a step, by the vectors that all engines share. */

import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { SequenceTable } from "../src/worker/cache/sequence-table.js";
import { shareRows } from "../src/worker/engine/prefill.js";
import { Request, type RequestListener } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { Scheduler } from "../src/worker/engine/scheduler.js";

interface Vector {
  readonly wanted: readonly number[];
  readonly budget: number;
  readonly shares: readonly number[];
}

const VECTORS = JSON.parse(
  readFileSync(new URL("../../tests/vectors/prefill/shares.json", import.meta.url), "utf8"),
) as readonly Vector[];
const SILENT: RequestListener = { token: () => true, finish: () => undefined, fail: () => undefined };

test.each(VECTORS)("$wanted in $budget", ({ wanted, budget, shares }) => {
  expect(shareRows(wanted, budget)).toEqual(shares);
});

function stepsUntilAWordIsRead(longPrompts: number): number {
  const buckets = [1, 4, 16, 64].map((size) => ({ size, logits: Math.min(size, 16) }));
  const scheduler = new Scheduler(new SequenceTable([400], 4, 16, [null]), buckets, 512);
  const made = (first: number, length: number) =>
    new Request(
      Array.from({ length }, (_, at) => first + at),
      parseSampling({ temperature: 0 }, null, 97),
      20,
      SILENT,
    );
  for (let number = 0; number < longPrompts; number++) scheduler.add(made(1000 * (number + 1), 150));
  const word = made(7, 3);
  scheduler.add(word);
  for (let steps = 1; steps < 100; steps++) {
    const step = scheduler.schedule(null);
    if (!step) break;
    scheduler.launched(step);
    scheduler.read(step);
    if (step.sampled.includes(word)) return steps;
    for (const request of step.sampled) scheduler.remove(request);
  }
  return Number.POSITIVE_INFINITY;
}

test("a word beside long prompts is read as soon as alone", () => {
  expect(stepsUntilAWordIsRead(8)).toBeLessThanOrEqual(stepsUntilAWordIsRead(0));
});
