/** Caches of 8 and 4 bits: the chosen program, and the bytes of its pages. */

import { describe, expect, test } from "vitest";
import type { Program } from "../src/artifact/manifest.js";
import { parseManifest } from "../src/artifact/reader.js";
import { RequestError } from "../src/protocol/errors.js";
import { bufferBytes, storedAs } from "../src/worker/device/memory.js";
import { wantedPrograms } from "../src/worker/device/wanted.js";
import { sampleManifest } from "./support/manifest.js";

const described = sampleManifest();
const [first] = described.programs;
const manifest = parseManifest(
  JSON.stringify({
    ...described,
    programs: (["float16", "int8", "int4"] as const).map((kv_dtype) => {
      return { ...first, name: kv_dtype, kv_dtype };
    }),
  }),
);
const named = (name: string): Program => {
  const found = manifest.programs.find((program) => program.name === name);
  if (!found) throw new Error(`no ${name}`);
  return found;
};

describe("the program for a cache", () => {
  const names = (wish: object, programs = manifest.programs): string[] =>
    wantedPrograms(programs, wish).map(({ name }) => name);

  test("has floats where nothing is asked for, or the widest codes of the artifact", () => {
    expect(names({})).toEqual(["float16"]);
    expect(names({}, [named("int4"), named("int8")])).toEqual(["int8"]);
  });

  test("is of the bits, or the name, that are asked for", () => {
    expect(names({ kvBits: 16 })).toEqual(["float16"]);
    const wide = { ...named("float16"), name: "float32", kvDtype: "float32" } as const;
    expect(names({ kvBits: 16 }, [wide, named("int8")])).toEqual(["float32"]);
    expect(names({ kvBits: 8 })).toEqual(["int8"]);
    expect(names({ kvBits: 4 })).toEqual(["int4"]);
    expect(names({ program: "int4" })).toEqual(["int4"]);
  });

  test("is refused by name where there is none, with the build that makes it", () => {
    const wish = () => names({ kvBits: 8 }, [named("float16")]);
    expect(wish).toThrow(RequestError);
    expect(wish).toThrow(/no program with a KV cache of 8 bits, only of float16.*--kv-bits 16,8/);
    expect(() => names({ kvBits: 3 })).toThrow(/of 3 bits, only of float16, int8, int4: leave kvBits out\.$/);
    expect(() => names({ kvBits: 8, program: "int4" })).toThrow(/of 8 bits, only of int4/);
  });
});

test("rows are words of codes and of what scales them, as format/kv.py says", () => {
  const entry = (headDim: number) =>
    ({ name: "kv.0.k", dtype: "kv", shape: ["pages.0", 2, 16, headDim] }) as const;
  const words = (headDim: number, name: string) => storedAs(entry(headDim), named(name)).shape.at(-1);
  expect([32, 64, 96, 128].map((dim) => words(dim, "int8"))).toEqual([9, 17, 27, 34]);
  expect([32, 64, 96, 128].map((dim) => words(dim, "int4"))).toEqual([5, 10, 15, 20]);
  expect(storedAs(entry(64), named("float16"))).toEqual({
    dtype: "float16",
    shape: ["pages.0", 2, 16, 64],
  });
  const extents = { pages: [3], contextLength: 48 };
  expect(bufferBytes(entry(64), named("int8"), extents)).toBe(3 * 2 * 16 * 17 * 4);
  expect(() => storedAs(entry(80), named("int8"))).toThrow(/Heads of 80 values/);
});
