import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { type BufferFacts, buffersFor } from "./support/buffers.js";

/** The table of buffers that Python also computes (tests/unit/test_format.py). */
const VECTOR = new URL("../../tests/vectors/format/buffers.json", import.meta.url);

interface Vector {
  readonly facts: Omit<BufferFacts, "ropes" | "weights"> & {
    /** The number of frequencies of each rotation table. */
    readonly frequencies: Readonly<Record<string, number>>;
  };
  readonly buffers: unknown;
}

test("the table of buffers is filled in as by Python", () => {
  const { facts, buffers } = JSON.parse(readFileSync(VECTOR, "utf8")) as Vector;
  const names = Object.keys(facts.frequencies);
  const ropes = Object.fromEntries(names.map((name) => [name, { inv_freq: `${name}.inv_freq`, scale: 1 }]));
  const tensors = names.map((name) => ({ name: `${name}.inv_freq`, shape: [facts.frequencies[name]] }));
  expect(buffersFor({ ...facts, ropes, weights: { tensors } })).toEqual(buffers);
});
