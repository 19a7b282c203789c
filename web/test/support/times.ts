/**
 * A reporter of vitest: CPU seconds (child processes included) beside wall time, per test and file, into one JSON
 * file, in the shape that `python -m tests.support.times FILE…` prints as tables (`make test-times`).
 *
 * A test's seconds are those since the test before it, with the hooks between them, as pytest counts them. What
 * tests that run side by side, `concurrent`, took together is shared out among them by their wall time; a file's
 * sum is exact either way. `collection` is what no test took: vitest's own process, with all that it transforms
 * and the package that it builds for several files, and each worker's start and imports; at least the first of
 * these, for a browser may end without its time being counted as this process's children's.
 */

import { mkdirSync, writeFileSync } from "node:fs";
import { cpus } from "node:os";
import { dirname, relative } from "node:path";
import { fileURLToPath } from "node:url";
import type { Reporter, TestCase, TestModule } from "vitest/node";
import { cpuSeconds } from "./cpu.js";
import type { Spent } from "./times-hooks.js";

/** Environment variable: the JSON file to write. Without it nothing is written. */
export const FILE = "NEARFAR_TEST_TIMES";

const ROOT = fileURLToPath(new URL("../../..", import.meta.url));

/** To be used with times-hooks.ts among the setup files. */
export class Times implements Reporter {
  readonly #start = performance.now();

  constructor(readonly path: string) {}

  onTestRunEnd(modules: readonly TestModule[]): void {
    const tests = Object.fromEntries(modules.flatMap((module) => [...testsOf(module)]));
    const { user, system } = process.cpuUsage();
    const inTests = Object.values(tests).reduce((sum, { cpu }) => sum + cpu, 0);
    const names = cpus();
    const told = {
      processor: `${names.length} x ${names[0]?.model ?? process.arch}`,
      wall: (performance.now() - this.#start) / 1000,
      collection: Math.max(cpuSeconds() - inTests, (user + system) / 1e6),
      tests,
      fixtures: {},
    };
    mkdirSync(dirname(this.path), { recursive: true });
    writeFileSync(this.path, JSON.stringify(told));
  }
}

/** The time of each test that has run, by `file::name`. */
function testsOf(module: TestModule): Map<string, Spent> {
  const all = [...module.children.allTests()].filter((test) => test.result().state !== "skipped");
  const alone = all.flatMap((test) => test.meta().spent ?? []);
  const rest = (module.meta().spent?.cpu ?? 0) - alone.reduce((sum, { cpu }) => sum + cpu, 0);
  // Time after the last test counts for that test, or for the concurrent ones.
  const sharing = all.filter((test) => !test.meta().spent);
  const takers = sharing.length > 0 ? sharing : all.slice(-1);
  const wallOf = (test: TestCase): number => (test.diagnostic()?.duration ?? 0) / 1000;
  const walls = takers.reduce((sum, test) => sum + wallOf(test), 0);
  const file = relative(ROOT, module.moduleId);
  const found = new Map<string, Spent>();
  for (const test of all) {
    const { cpu, wall } = test.meta().spent ?? { cpu: 0, wall: wallOf(test) };
    const share = takers.includes(test) ? rest * (walls > 0 ? wallOf(test) / walls : 1 / takers.length) : 0;
    const name = `${file}::${test.fullName}`;
    const before = found.get(name) ?? { cpu: 0, wall: 0 };
    found.set(name, { cpu: before.cpu + cpu + share, wall: before.wall + wall });
  }
  return found;
}
