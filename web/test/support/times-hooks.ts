/** Runs in each worker, before a file's own hooks and after them: measures, for the reporter of times.ts. */

import { afterAll, afterEach, beforeAll, type RunnerTask, type RunnerTestFile } from "vitest";
import { cpuSeconds } from "./cpu.js";

/** CPU and wall seconds. */
export interface Spent {
  cpu: number;
  wall: number;
}

declare module "vitest" {
  interface TaskMeta {
    /** Seconds of a test, with the hooks since the end of the previous test; for a file, the sum of its tests. */
    spent?: Spent;
  }
}

let cpu = 0;
let clock = 0;
const whole: Spent = { cpu: 0, wall: 0 };

function lap(): Spent {
  const [now, at] = [cpuSeconds(), performance.now()];
  // The time of a closed browser's children is no longer reported; a decrease counts as 0.
  const spent = { cpu: Math.max(0, now - cpu), wall: (at - clock) / 1000 };
  [cpu, clock] = [now, at];
  whole.cpu += spent.cpu;
  whole.wall += spent.wall;
  return spent;
}

beforeAll(() => {
  lap();
  Object.assign(whole, { cpu: 0, wall: 0 });
});

let file: RunnerTestFile | null = null;
afterEach(({ task }) => {
  file = task.file;
  const spent = lap();
  // The time of concurrent tests cannot be assigned to one of them.
  if (!isBeside(task)) task.meta.spent = spent;
});

/** Whether others may run beside a test: it is concurrent, or one of the suites that it is in. */
function isBeside(task: RunnerTask): boolean {
  return task.concurrent === true || (task.suite !== undefined && isBeside(task.suite));
}

afterAll(() => {
  lap();
  if (file) file.meta.spent = whole;
});
