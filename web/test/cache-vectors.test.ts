import { readdirSync, readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { type CachedSequence, SequenceTable } from "../src/worker/cache/sequence-table.js";

/** The scenarios that the Python SequenceTable passes too; tests/vectors/cache/README.md says what each key means. */
const VECTORS = new URL("../../tests/vectors/cache/", import.meta.url);

interface Step {
  readonly op: string;
  readonly args: { readonly slot?: number; readonly length?: number; readonly tokens?: number[] };
  readonly result: unknown;
  readonly state: unknown;
}

interface Scenario {
  readonly name: string;
  readonly description: string;
  readonly config: { readonly pages: number; readonly page_size: number; readonly slots: number };
  readonly steps: readonly Step[];
}

function sequenceOf(table: SequenceTable, slot: number | undefined): CachedSequence {
  const found = table.sequences().find((sequence) => sequence.slot === slot);
  if (!found) throw new Error(`the vector names slot ${slot}, which is not open`);
  return found;
}

function apply(table: SequenceTable, { op, args }: Step): unknown {
  const { tokens = [], length = 0 } = args;
  switch (op) {
    case "open": {
      const opened = table.open(tokens);
      return opened && { slot: opened.slot, cached: opened.tokens.length };
    }
    case "reserve": {
      const copies = table.reserve(sequenceOf(table, args.slot), length);
      return copies && { copies };
    }
    case "append":
      table.append(sequenceOf(table, args.slot), tokens);
      return {};
    case "fork": {
      const forked = table.fork(sequenceOf(table, args.slot));
      return forked && { slot: forked.slot };
    }
    case "truncate":
      table.truncate(sequenceOf(table, args.slot), length);
      return {};
    case "release":
      table.release(sequenceOf(table, args.slot));
      return {};
    case "clear":
      return { evicted: table.clear() };
    default:
      throw new Error(`unknown operation ${op}`);
  }
}

function stateOf(table: SequenceTable): unknown {
  return {
    free: table.allocator.freePages(),
    refs: Array.from({ length: table.allocator.count }, (_, page) => table.allocator.refs(page)),
    index: table.index.entries(),
    idle: table.index.idlePages(),
    sequences: table.sequences().map(({ slot, tokens, pages }) => ({ slot, tokens, pages })),
  };
}

describe("cache vectors", () => {
  const files = readdirSync(VECTORS).filter((file) => file.endsWith(".json"));
  test("exist", () => expect(files.length).toBeGreaterThan(0));

  for (const file of files) {
    const scenario = JSON.parse(readFileSync(new URL(file, VECTORS), "utf8")) as Scenario;
    test(`${scenario.name}: ${scenario.description}`, () => {
      const { pages, page_size, slots } = scenario.config;
      const table = new SequenceTable(pages, page_size, slots);
      scenario.steps.forEach((step, i) => {
        expect(apply(table, step), `result of step ${i}, ${step.op}`).toEqual(step.result);
        expect(stateOf(table), `state after step ${i}, ${step.op}`).toEqual(step.state);
      });
    });
  }
});
