import { availableParallelism } from "node:os";
import { defineConfig } from "vitest/config";
import { BaseSequencer, type TestSpecification } from "vitest/node";
import { asModule, LIBRARY } from "./scripts/grammars.mjs";
import { FILE, Times } from "./test/support/times.js";

/** Files that take longest, in this order: one that begins last keeps everybody waiting. */
const LONGEST = [
  "browser/apps/next",
  "browser/apps/bundlers",
  "browser/apps/vite",
  "browser/apps/plain",
  "browser/store",
  "browser/tabs",
  "browser/hostile",
  "browser/loading",
  "browser/wasm",
  "fit/package",
  "fit/docs",
  "grammars",
];

class LongestFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const rank = ({ moduleId }: TestSpecification): number => {
      const found = LONGEST.findIndex((name) => moduleId.endsWith(`/test/${name}.test.ts`));
      return found < 0 ? LONGEST.length : found;
    };
    return (await super.sort(files)).sort((a, b) => rank(a) - rank(b));
  }
}

const times = process.env[FILE];

/** The sources need the library of grammars as the package has it. */
const grammarsAsModule = {
  name: "grammars as a module",
  transform: (text: string, id: string) =>
    LIBRARY.test(id) ? { code: asModule(text, "node"), map: null } : null,
};

export default defineConfig({
  plugins: [grammarsAsModule],
  test: {
    server: { deps: { inline: [LIBRARY] } },
    pool: "forks",
    // Much of what browsers do is waiting; tests that count on seconds have room for one more than processors.
    maxWorkers: availableParallelism() + 1,
    maxConcurrency: 2,
    testTimeout: 30_000,
    hookTimeout: 240_000,
    sequence: { sequencer: LongestFirst },
    globalSetup: ["test/support/builder.ts"],
    ...(times && { reporters: ["default", new Times(times)], setupFiles: ["test/support/times-hooks.ts"] }),
  },
});
