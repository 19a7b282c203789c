import { describe, expect, test } from "vitest";
import { parseManifest } from "../src/artifact/reader.js";
import type { DeviceClass } from "../src/protocol/backends.js";
import { DeviceError, RequestError } from "../src/protocol/errors.js";
import { planMemory } from "../src/worker/device/memory.js";
import { ropeTable } from "../src/worker/device/rope.js";
import { type AdapterAbilities, withLanguage } from "../src/worker/gpu/adapter.js";
import { ablePrograms } from "../src/worker/gpu/device.js";
import { settled } from "../src/worker/gpu/opening.js";
import { partsIn } from "../src/worker/gpu/weights.js";
import { buffersFor } from "./support/buffers.js";
import { sampleManifest } from "./support/manifest.js";

const manifest = parseManifest(JSON.stringify(sampleManifest()));
const [f16, f32] = manifest.programs;
if (!f16 || !f32) throw new Error("the sample has two programs");

function adapter(features: string[], limits: object = {}): AdapterAbilities {
  const enough = {
    maxStorageBuffersPerShaderStage: 8,
    maxComputeInvocationsPerWorkgroup: 256,
    maxStorageBufferBindingSize: 2 ** 27,
  };
  return { features: new Set(features), limits: { ...enough, ...limits } };
}

describe("the programs for a device", () => {
  test("are those that it can run", () => {
    expect(ablePrograms(manifest, adapter(["shader-f16"]))).toEqual([f16, f32]);
    expect(ablePrograms(manifest, adapter([]))).toEqual([f32]);
  });

  test("leave no choice where one is asked for, or only one is able, or the GPU is emulated in software", () => {
    const described = sampleManifest();
    const [first] = described.programs;
    const made = (["software", "integrated"] as const).map((name) => {
      return { ...first, name, device_class: name };
    });
    const both = parseManifest(JSON.stringify({ ...described, programs: made }));
    const choose = (deviceClass: DeviceClass, programs: string[], pinned?: string) => {
      const some = both.programs.filter(({ name }) => programs.includes(name));
      const able = ablePrograms({ ...both, programs: some }, adapter(["shader-f16"]), { program: pinned });
      const choice = settled(able, deviceClass, pinned !== undefined);
      return choice && [choice.program, choice.why];
    };
    const all = ["software", "integrated"];
    expect(choose("discrete", all)).toBeNull();
    expect(choose("discrete", ["software"])).toEqual(["software", "only"]);
    expect(choose("software", all)).toEqual(["software", "software"]);
    expect(choose("software", all, "integrated")).toEqual(["integrated", "pinned"]);
    expect(() => choose("software", all, "fast")).toThrow(RequestError);
    expect(() => choose("software", all, "fast")).toThrow("has the programs software, integrated, not fast");
  });

  test("may need a feature of the language, which no adapter lists", () => {
    const packed = "packed_4x8_integer_dot_product";
    const described = sampleManifest();
    const [first] = described.programs;
    const made = { ...first, name: "int8", requires: { features: [packed], limits: {} } };
    const packing = parseManifest(JSON.stringify({ ...described, programs: [made] }));
    const choose = (language?: Set<string>) =>
      ablePrograms(packing, withLanguage(adapter([]), language)).map(({ name }) => name);
    expect(choose(new Set([packed]))).toEqual(["int8"]);
    expect(() => choose(new Set())).toThrow(`int8: ${packed}`);
    expect(() => choose()).toThrow(DeviceError);
  });

  test("may not exist: the error names what each lacks, with the numbers", () => {
    const weak = adapter([], { maxComputeInvocationsPerWorkgroup: 128, maxStorageBufferBindingSize: 100 });
    const choose = () => ablePrograms(manifest, weak);
    expect(choose).toThrow(DeviceError);
    expect(choose).toThrow(
      /f16: shader-f16, maxComputeInvocationsPerWorkgroup must be 256, is 128.*f32: max/,
    );
    expect(choose).toThrow(/maxStorageBufferBindingSize must be 768, is 100/);
  });
});

describe("the memory plan", () => {
  const plan = (options: object, limit = 2 ** 27) => planMemory(manifest, f32, limit, options);

  test("has room for every slot's whole context where memory is given, else for two", () => {
    // 100 tokens are 7 pages; 4 slots; a page holds 16 tokens of 2 × 16 bytes.
    expect(plan({ kvMemory: 2 ** 29 })).toEqual({ pages: [28], contextLength: 100, kvBytes: 28 * 512 });
    expect(plan({})).toEqual({ pages: [14], contextLength: 100, kvBytes: 14 * 512 });
  });

  test("shortens the context to the budget and to the device's limit", () => {
    expect(plan({ kvMemory: 512 * 3 })).toMatchObject({ pages: [3], contextLength: 48 });
    expect(plan({}, 256 * 2)).toMatchObject({ pages: [2], contextLength: 32 });
  });

  test("gives a group with a window what it needs, and the context comes first", () => {
    const groups = [{ window: null }, { window: 512 }];
    const caches = [0, 1, 1, 1].map((group) => ({ kv_heads: 1, head_dim: 4, group }));
    const model = { ...sampleManifest().model, context_length: 32768 };
    const described = { ...sampleManifest(), groups, caches, model };
    const made = parseManifest(JSON.stringify({ ...described, buffers: buffersFor(described) }));
    const program = made.programs.find(({ name }) => name === "f32");
    if (!program) throw new Error("the sample has no f32 program");
    const page = 512; // 16 tokens of 2 × 16 bytes in each cache
    const need = Math.ceil((512 + 254) / 16) + 1;
    const shared = (kvMemory: number) => planMemory(made, program, 2 ** 40, { kvMemory });
    expect(shared(40 * page)).toMatchObject({ pages: [10, 10], contextLength: 160 });
    expect(shared((1000 + 3 * need) * page)).toMatchObject({ pages: [1000, need], contextLength: 16000 });
    const three = 2048 + 2 * 256 + 3 * 3 * need;
    expect(shared(three * page)).toEqual({
      pages: [2048 + 2 * 256, 3 * need],
      contextLength: 32768,
      kvBytes: three * page,
    });
  });

  test("refuses what the caller insists on and does not fit, with the numbers", () => {
    expect(() => plan({ kvMemory: 512 * 3, contextLength: 80 })).toThrow(
      /80 tokens needs 2560 bytes.*48 tokens/,
    );
    expect(() => plan({ kvMemory: 100 })).toThrow(DeviceError);
    expect(() => plan({ contextLength: 101 })).toThrow(RequestError);
    expect(() => plan({ kvMemory: Number.NaN })).toThrow(RequestError);
  });
});

test("tensors may span shards", () => {
  const stream = Uint8Array.from({ length: 1024 }, (_, i) => i % 251);
  const joined = new Map(manifest.weights.tensors.map(({ name, bytes }) => [name, new Uint8Array(bytes)]));
  for (let start = 0; start < 1024; start += 512)
    for (const { tensor, part, at } of partsIn(
      manifest.weights.tensors,
      start,
      stream.slice(start, start + 512),
    ))
      joined.get(tensor.name)?.set(part, at);
  for (const { name, offset, bytes } of manifest.weights.tensors)
    expect(joined.get(name)).toEqual(stream.slice(offset, offset + bytes));
});

test("rope rows are cosines, then sines", () => {
  const table = ropeTable(new Float32Array([1, 0.5]), 2, 3);
  expect([...table.subarray(0, 4)]).toEqual([2, 2, 0, 0]);
  expect(table[8]).toBe(Math.fround(2 * Math.cos(2)));
  expect(table[11]).toBe(Math.fround(2 * Math.sin(1)));
});

test("a frequency of 0 neither rotates nor scales", () => {
  const table = ropeTable(new Float32Array([1, 0]), 3, 2);
  expect([...table.subarray(4)]).toEqual([Math.fround(3 * Math.cos(1)), 1, Math.fround(3 * Math.sin(1)), 0]);
});
