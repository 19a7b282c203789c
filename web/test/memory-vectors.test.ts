import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { parseManifest } from "../src/artifact/reader.js";
import { DeviceError } from "../src/protocol/errors.js";
import { planMemory } from "../src/worker/device/memory.js";

/** Memory plans that Python also makes (tests/unit/test_memory_vectors.py). */
const VECTORS = new URL("../../tests/vectors/memory/plans.json", import.meta.url);

interface Vectors {
  readonly manifests: Readonly<Record<string, unknown>>;
  readonly cases: readonly Case[];
}

interface Case {
  readonly manifest: string;
  readonly program: string;
  readonly kv_memory: number;
  readonly largest_buffer: number;
  readonly pages: readonly number[] | null;
  readonly context: number | null;
}

const { manifests, cases } = JSON.parse(readFileSync(VECTORS, "utf8")) as Vectors;

describe("a budget gives the pages that it gives in Python", () => {
  test.each(cases)("$manifest, $program: $kv_memory bytes, buffers of $largest_buffer", (one) => {
    const manifest = parseManifest(JSON.stringify(manifests[one.manifest]));
    const program = manifest.programs.find(({ name }) => name === one.program);
    if (program === undefined) throw new Error(`no program ${one.program}`);
    const plan = () => planMemory(manifest, program, one.largest_buffer, { kvMemory: one.kv_memory });
    if (one.pages === null) expect(plan).toThrow(DeviceError);
    else expect(plan()).toMatchObject({ pages: one.pages, contextLength: one.context });
  });
});
