import { readdirSync, readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { type CachedSequence, SequenceTable } from "../src/worker/cache/sequence-table.js";

/**
 * The scenarios that the Python SequenceTable passes too; tests/vectors/cache/README.md says what each key
 * means.
 */
const VECTORS = new URL("../../tests/vectors/cache/", import.meta.url);

interface Step {
  readonly op: string;
  readonly args: {
    readonly slot?: number;
    readonly length?: number;
    readonly soon?: number;
    readonly common?: number;
    readonly tokens?: number[];
  };
  readonly result: unknown;
  readonly state: unknown;
}

interface Scenario {
  readonly name: string;
  readonly description: string;
  readonly config: {
    /** Pages by group; a plain number is for a single group without a window. */
    readonly pages: number | number[];
    readonly page_size: number;
    readonly slots: number;
    readonly windows?: (number | null)[];
    readonly strides?: (number | null)[];
  };
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
      const copies = table.reserve(sequenceOf(table, args.slot), length, args.soon);
      return copies && { copies: isPlain(table) ? copies.map(([, from, to]) => [from, to]) : copies };
    }
    case "append":
      table.append(sequenceOf(table, args.slot), tokens);
      return {};
    case "advance":
      table.advance(sequenceOf(table, args.slot), length);
      return {};
    case "keep":
      table.keep(sequenceOf(table, args.slot));
      return {};
    case "borders":
      return { border: table.border(length), leaves: table.leaves(length, args.common ?? 0) };
    case "fork": {
      const forked = table.fork(sequenceOf(table, args.slot), args.length);
      return forked && { slot: forked.slot };
    }
    case "shareable":
      return { length: table.shareable(sequenceOf(table, args.slot), length) };
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

/** Whether the vectors write the table's state without groups. */
function isPlain({ groups }: SequenceTable): boolean {
  return groups.length === 1 && groups[0]?.window.size === null;
}

function groupOf(table: SequenceTable, group: number) {
  const allocator = table.groups[group]?.allocator;
  return {
    free: allocator?.freePages(),
    refs: Array.from({ length: allocator?.count ?? 0 }, (_, page) => allocator?.refs(page)),
    idle: table.index.idlePages(group),
  };
}

function stateOf(table: SequenceTable): unknown {
  const nodes = table.index.nodes();
  if (isPlain(table))
    return {
      ...groupOf(table, 0),
      index: nodes
        .map(({ node }): [number, number, readonly number[]] => [
          node.pages[0] ?? -1,
          node.parent?.pages[0] ?? -1,
          node.tokens,
        ])
        .sort(([a], [b]) => a - b),
      sequences: table.sequences().map(({ slot, tokens, held }) => ({ slot, tokens, pages: held[0]?.pages })),
    };
  return {
    groups: table.groups.map((_, group) => groupOf(table, group)),
    index: nodes.sort((a, b) => compare(a.path, b.path)).map(({ path, node }) => [path, node.pages]),
    sequences: table.sequences().map(({ slot, tokens, held }) => ({
      slot,
      tokens: tokens.length,
      held: held.map(({ first, pages }) => [first, pages]),
    })),
  };
}

/** Compares lists in Python's order. */
function compare(a: readonly number[], b: readonly number[]): number {
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return (a[i] ?? 0) - (b[i] ?? 0);
  return a.length - b.length;
}

describe("cache vectors", () => {
  const files = readdirSync(VECTORS).filter((file) => file.endsWith(".json"));
  test("exist", () => expect(files.length).toBeGreaterThan(0));

  for (const file of files) {
    const scenario = JSON.parse(readFileSync(new URL(file, VECTORS), "utf8")) as Scenario;
    test(`${scenario.name}: ${scenario.description}`, () => {
      const { pages, page_size, slots, windows, strides } = scenario.config;
      const table = new SequenceTable(
        typeof pages === "number" ? [pages] : pages,
        page_size,
        slots,
        windows,
        strides,
      );
      scenario.steps.forEach((step, i) => {
        expect(apply(table, step), `result of step ${i}, ${step.op}`).toEqual(step.result);
        expect(stateOf(table), `state after step ${i}, ${step.op}`).toEqual(step.state);
      });
    });
  }
});
