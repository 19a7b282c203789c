import { describe, expect, test } from "vitest";
import { ArtifactError } from "../src/errors.js";
import { parseManifest } from "../src/manifest.js";
import { parsePlan } from "../src/plan.js";
import { sampleManifest } from "./support/manifest.js";

type Sample = ReturnType<typeof sampleManifest>;

function parseWith(change: (manifest: Sample) => void): unknown {
  const manifest = sampleManifest();
  change(manifest);
  return parseManifest(JSON.stringify(manifest));
}

describe("manifest", () => {
  test("is read with the sizes of a function in ascending order", () => {
    const manifest = parseManifest(JSON.stringify(sampleManifest()));
    expect(manifest.model).toMatchObject({ name: "sample", bosTokenId: 0, eosTokenIds: [1], contextLength: 100 });
    expect(manifest.programs.map(({ precision }) => precision)).toEqual(["f16", "f32"]);
    expect(manifest.programs[0]?.functions.step.map(({ size }) => size)).toEqual([1, 4]);
    expect(manifest.programs[0]?.functions.sample).toEqual([]);
  });

  test("takes a model without BOS", () => {
    expect(
      parseWith((m) => {
        m.model.bos_token_id = null;
      }),
    ).toMatchObject({ model: { bosTokenId: null } });
  });

  const wrong: [string, RegExp, (manifest: Sample) => void][] = [
    [
      "another format",
      /no nearfar artifact/,
      (m) => {
        m.format = "zip";
      },
    ],
    [
      "a newer version",
      /format version 2.*Upgrade/,
      (m) => {
        m.version = 2;
      },
    ],
    [
      "another target",
      /built for cpu.*--target webgpu/,
      (m) => {
        m.target = "cpu";
      },
    ],
    [
      "a wrong type",
      /manifest\.json\.model\.layers should be an integer ≥ 1, but is 1\.5/,
      (m) => {
        m.model.layers = 1.5;
      },
    ],
    [
      "an unknown dtype",
      /tensors\[1\]\.dtype should be one of/,
      (m) => {
        Object.assign(m.weights.tensors[1] ?? {}, { dtype: "int3" });
      },
    ],
    [
      "an unknown symbol",
      /buffers\[1\]\.shape\[0\] should be one of pages, context/,
      (m) => {
        m.buffers[1]?.shape.splice(0, 1, "batch");
      },
    ],
    [
      "a path out of the artifact",
      /file should be a relative path/,
      (m) => {
        Object.assign(m.weights.shards[0] ?? {}, { file: "../x" });
      },
    ],
    [
      "a missing shard",
      /hold 512 bytes, manifest\.json states 1024/,
      (m) => {
        m.weights.shards.pop();
      },
    ],
    [
      "a shard of a wrong size",
      /00000\.bin is listed with 500 bytes/,
      (m) => {
        Object.assign(m.weights.shards[0] ?? {}, { bytes: 500 });
      },
    ],
    [
      "a tensor outside the stream",
      /embed\.codes \[512, 1280\) lies outside/,
      (m) => {
        Object.assign(m.weights.tensors[1] ?? {}, { offset: 512 });
      },
    ],
    [
      "a tensor of a wrong size",
      /embed\.codes has 764 bytes; its shape and dtype need 768/,
      (m) => {
        Object.assign(m.weights.tensors[1] ?? {}, { bytes: 764 });
      },
    ],
    [
      "no rope frequencies",
      /lack the tensor rope\.other/,
      (m) => {
        m.rope.inv_freq = "rope.other";
      },
    ],
    [
      "no programs",
      /no programs/,
      (m) => {
        m.programs = [];
      },
    ],
  ];
  test.each(wrong)("with %s is refused", (_, message, change) => {
    expect(() => parseWith(change)).toThrow(message);
    expect(() => parseWith(change)).toThrow(ArtifactError);
  });

  test("that is no JSON is refused", () => {
    expect(() => parseManifest("<!doctype html>")).toThrow(/manifest\.json is no valid JSON/);
  });
});

describe("plan", () => {
  const kernels = parseManifest(JSON.stringify(sampleManifest())).programs[0]?.kernels ?? new Map();
  const plan = (launch: object): string => JSON.stringify({ function: "step", size: 1, rows: 1, launches: [launch] });

  test("is read", () => {
    const text = plan({ kernel: "k", grid: [70000, 1, 1], args: ["weight:embed.codes", "workspace:0"] });
    expect(parsePlan(text, "step.1.json", kernels).launches).toEqual([
      {
        kernel: "k",
        grid: [70000, 1, 1],
        args: [
          { space: "weight", name: "embed.codes" },
          { space: "workspace", name: "0" },
        ],
      },
    ]);
  });

  test("with an unknown kernel, space or number of arguments is refused", () => {
    const parse = (launch: object) => () => parsePlan(plan(launch), "step.1.json", kernels);
    expect(parse({ kernel: "x", grid: [1, 1, 1], args: [] })).toThrow(/names the kernel x/);
    expect(parse({ kernel: "k", grid: [1, 1, 1], args: ["weight:a"] })).toThrow(/gives k 1 arguments; it takes 2/);
    expect(parse({ kernel: "k", grid: [1, 1, 1], args: ["weight:a", "disk:b"] })).toThrow(/known spaces/);
  });
});
