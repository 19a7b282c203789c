import { describe, expect, test } from "vitest";
import { frequenciesOf, type Manifest, type Program, precisionOf } from "../src/artifact/manifest.js";
import { openManifest, parseManifest } from "../src/artifact/reader.js";
import { OLDEST, VERSION } from "../src/format/constants.js";
import { ArtifactError } from "../src/protocol/errors.js";
import { within } from "../src/storage/http.js";
import { parsePlan, planNames } from "../src/worker/device/plan.js";
import { buffersFor } from "./support/buffers.js";
import { sampleManifest } from "./support/manifest.js";
import { seal } from "./support/seal.js";

type Sample = ReturnType<typeof sampleManifest>;

function parseWith(change: (manifest: Sample) => void): unknown {
  const manifest = sampleManifest();
  change(manifest);
  return parseManifest(JSON.stringify(manifest));
}

describe("manifest", () => {
  test("is read", () => {
    const manifest = parseManifest(JSON.stringify(sampleManifest()));
    expect(manifest.model).toMatchObject({
      name: "sample",
      bosTokenId: 0,
      eosTokenIds: [1],
      contextLength: 100,
    });
    expect(manifest.programs.map(({ name }) => name)).toEqual(["f16", "f32"]);
    expect(manifest.programs.map(precisionOf)).toEqual(["f16", "f32"]);
    expect(manifest.programs[0]?.functions.step.map(({ size }) => size)).toEqual([1, 4]);
    expect(manifest.caches).toEqual([{ kvHeads: 1, headDim: 4, group: 0, parts: "kv", depth: 0 }]);
    expect([...manifest.ropes]).toEqual([["base", { invFreq: "rope.base.inv_freq", scale: 1, short: null }]]);
  });

  test("says how the model wants its tokens drawn", () => {
    expect(parseManifest(JSON.stringify(sampleManifest())).sampling).toEqual({});
    const sampling = { temperature: 0.6, top_k: 20 };
    expect(parseWith((m) => Object.assign(m, { sampling }))).toMatchObject({ sampling });
    expect(() => parseWith((m) => Object.assign(m, { sampling: { top_k: "20" } }))).toThrow(
      "manifest.json.sampling.top_k should be a number",
    );
  });

  test("takes layers with a window, and a second table of rotations", () => {
    const two = (m: Sample): void => {
      m.groups.push({ window: 8 });
      m.caches.push({ kv_heads: 2, head_dim: 4, group: 1 });
      m.ropes.local = { inv_freq: "rope.base.inv_freq", scale: 2 };
      m.buffers = buffersFor(m);
    };
    const { buffers, groups } = parseWith(two) as Manifest;
    expect(groups).toEqual([
      { window: null, stride: null },
      { window: 8, stride: null },
    ]);
    const shapes = Object.fromEntries(buffers.map(({ name, shape }) => [name, shape]));
    expect(shapes).toMatchObject({
      "page_table.1": [4, 7],
      "rope.local": ["context", 4],
      "kv.1.v": ["pages.1", 2, 16, 4],
    });
  });

  test("has the short factors of LongRoPE for engines with a short context", () => {
    const short = (invFreq: string) => (m: Sample) =>
      Object.assign(m.ropes.base ?? {}, { short: { inv_freq: invFreq, context: 40 } });
    const tensor = { name: "short", dtype: "float32", shape: [2], offset: 256, bytes: 8 };
    const { ropes } = parseWith((m) => {
      Object.assign(m.weights.tensors[1] ?? {}, { offset: 512, shape: [32, 4], bytes: 512 });
      m.weights.tensors.splice(1, 0, tensor);
      short("short")(m);
    }) as Manifest;
    const [rope] = ropes.values();
    if (!rope) throw new Error("no rope");
    expect([40, 41].map((context) => frequenciesOf(rope, context))).toEqual(["short", "rope.base.inv_freq"]);
    expect(() => parseWith(short("none"))).toThrow("lack the tensor none");
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
      /not an artifact of nearfar/,
      (m) => {
        m.format = "zip";
      },
    ],
    [
      "a newer version",
      /format version 6, this runtime reads up to 5.*Upgrade/,
      (m) => {
        m.version = VERSION + 1;
      },
    ],
    [
      "an older version",
      /format version 2, this runtime reads from 3 on.*Build it again/,
      (m) => {
        m.version = OLDEST - 1;
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
      /manifest\.json\.caches\[0\]\.kv_heads should be an integer ≥ 1, but is 1\.5/,
      (m) => {
        Object.assign(m.caches[0] ?? {}, { kv_heads: 1.5 });
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
      /buffers\[1\]\.shape\[0\] should be a number, context or pages\.<group>/,
      (m) => {
        Object.assign(m.buffers[1] ?? {}, { shape: ["batch"] });
      },
    ],
    [
      "a buffer of another shape",
      /The buffer tokens is int32 \[128\]; by its model and caches it should be int32 \[256\]/,
      (m) => {
        Object.assign(m.buffers[0] ?? {}, { shape: [128] });
      },
    ],
    [
      "a buffer that nobody fills",
      /lists the buffer state\.0, which this runtime does not know/,
      (m) => {
        m.buffers.push({ name: "state.0", dtype: "float32", shape: [4] });
      },
    ],
    [
      "a missing buffer",
      /lacks the buffer kv\.0\.v/,
      (m) => {
        m.buffers.pop();
      },
    ],
    [
      "a cache of a group that does not exist",
      /caches are of groups 1, and there are 1 groups/,
      (m) => {
        Object.assign(m.caches[0] ?? {}, { group: 1 });
      },
    ],
    [
      "a group without a cache",
      /caches are of groups 0, and there are 2 groups/,
      (m) => {
        m.groups.push({ window: 8 });
      },
    ],
    [
      "two groups that are one",
      /Two groups have the same window: none,none/,
      (m) => {
        m.groups.push({ window: null });
        m.caches.push({ kv_heads: 1, head_dim: 4, group: 1 });
      },
    ],
    [
      "two programs of one name",
      /Two programs have the name f16/,
      (m) => {
        Object.assign(m.programs[1] ?? {}, { name: "f16" });
      },
    ],
    [
      "activations of an unknown dtype",
      /programs\[0\]\.activations should be one of float16, float32/,
      (m) => {
        Object.assign(m.programs[0] ?? {}, { activations: "bfloat16" });
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
      "tensors that overlap",
      /rope\.base\.inv_freq and embed\.codes overlap/,
      (m) => {
        Object.assign(m.weights.tensors[1] ?? {}, { offset: 0, shape: [8, 4], bytes: 128 });
      },
    ],
    [
      "a tensor named twice",
      /name a tensor twice/,
      (m) => {
        Object.assign(m.weights.tensors[1] ?? {}, { name: "rope.base.inv_freq" });
      },
    ],
    [
      "rope frequencies of another shape",
      /embed\.codes is uint32 \[8,24\]; rope base needs float32 \[2\]/,
      (m) => {
        Object.assign(m.ropes.base ?? {}, { inv_freq: "embed.codes" });
      },
    ],
    [
      "a special token beyond the vocabulary",
      /special token 97 is not below the vocabulary's size, 97/,
      (m) => {
        m.model.eos_token_ids = [1, 97];
      },
    ],
    [
      "a plan without its hash",
      /step\[0\]\.sha256 should be a string/,
      (m) => {
        Reflect.deleteProperty(m.programs[0]?.functions.step[0] ?? {}, "sha256");
      },
    ],
    [
      "no bucket of a function that every token needs",
      /has no bucket of greedy/,
      (m) => {
        Object.assign(m.programs[0]?.functions ?? {}, { greedy: [] });
      },
    ],
    [
      "no bucket of sample",
      /The program f16 has no bucket of sample/,
      (m) => {
        Object.assign(m.programs[0]?.functions ?? {}, { sample: [] });
      },
    ],
    [
      "no logprobs",
      /functions\.logprobs should be a list, but is nothing/,
      (m) => {
        Reflect.deleteProperty(m.programs[1]?.functions ?? {}, "logprobs");
      },
    ],
    [
      "two buckets of one size",
      /lists step of size 1 twice, or out of order/,
      (m) => {
        Object.assign(m.programs[0]?.functions.step[1] ?? {}, { size: 1 });
      },
    ],
    [
      "buckets out of order",
      /lists step of size 1 twice, or out of order/,
      (m) => {
        m.programs[0]?.functions.step.reverse();
      },
    ],
    [
      "a bucket larger than the buffers",
      /lists step of size 257 with 4 rows, which the buffers do not hold/,
      (m) => {
        Object.assign(m.programs[0]?.functions.step[1] ?? {}, { size: 257 });
      },
    ],
    [
      "a bucket with more rows of logits than the buffers",
      /lists step of size 64 with 17 rows, which the buffers do not hold/,
      (m) => {
        Object.assign(m.programs[0]?.functions.step[1] ?? {}, { size: 64, rows: 17 });
      },
    ],
    [
      "no rope frequencies",
      /lack the tensor rope\.other/,
      (m) => {
        Object.assign(m.ropes.base ?? {}, { inv_freq: "rope.other" });
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

  const outside = [
    ...[
      "../x",
      "a/../b",
      "a/./b",
      "/etc/passwd",
      "weights/%2e%2e/%2e%2e/x",
      ".\t./x",
      "x\n/../../../etc/passwd",
      "x\n",
    ],
    ...["a\\..\\b", "https://elsewhere/x", "//elsewhere/x", "x?y", "x#y", "", "a//b", "a/"],
  ];
  test.each(outside)("with a file %j is refused", (file) => {
    const change = (m: Sample): void => {
      Object.assign(m.programs[0]?.kernels.k ?? {}, { file });
    };
    expect(() => parseWith(change)).toThrow(/k\.file should be a relative path/);
  });

  test("whose value is nested too deeply to be shown is refused all the same", () => {
    const deep = "[".repeat(100_000) + "]".repeat(100_000);
    expect(() => parseManifest(`{"format": ${deep}}`)).toThrow(ArtifactError);
    expect(() => parseManifest(JSON.stringify(sampleManifest()).replace('"sample"', deep))).toThrow(
      ArtifactError,
    );
  });

  test("as the build wrote it is opened, and refused once anything in it has changed", async () => {
    const text = seal(sampleManifest());
    await expect(openManifest(text)).resolves.toMatchObject({ model: { name: "sample" } });
    const edits: [string, string][] = [
      ['"scale": 1', '"scale": 2'],
      ['"license": "mit"', '"license": "any"'],
      ["}\n", "} \n"],
      ['"manifest_sha256": "', `"manifest_sha256": "${"0".repeat(64)}", "other": "`],
    ];
    for (const [from, to] of edits) {
      expect(text).toContain(from);
      await expect(openManifest(text.replace(from, to))).rejects.toThrow(
        /is not as the build wrote it.*again/,
      );
    }
    await expect(openManifest(JSON.stringify(sampleManifest()))).rejects.toThrow(
      /manifest_sha256 should be a string/,
    );
  });

  test("that is not JSON is refused", () => {
    expect(() => parseManifest("<!doctype html>")).toThrow(/manifest\.json is not valid JSON/);
  });
});

describe("a file's address", () => {
  const base = new URL("https://host/models/a/");
  test("stays inside the artifact, however it is spelled", () => {
    expect(within(base, "weights/00000.bin").href).toBe("https://host/models/a/weights/00000.bin");
    for (const file of [
      "weights/%2e%2e/%2e%2e/x",
      ".\t./x",
      "..\\x",
      "/x",
      "//other/models/a/x",
      "https://host/models/b",
    ])
      expect(() => within(base, file)).toThrow(/lies outside the artifact/);
  });
});

describe("plan", () => {
  const manifest = parseManifest(JSON.stringify(sampleManifest()));
  const program = manifest.programs[0] as Program;
  const names = planNames(manifest, program);
  const bucket = { size: 1, rows: 1, plan: "step.1.json", sha256: "" };
  const launch = { kernel: "k", grid: [70000, 1, 1], args: ["weight:embed.codes", "workspace:0"] };
  const parse = (changes: object): unknown => {
    const plan = { function: "step", size: 1, rows: 1, launches: [launch], ...changes };
    return parsePlan(JSON.stringify(plan), "step", bucket, names);
  };

  test("is read", () => {
    expect(parse({})).toEqual({
      launches: [
        {
          kernel: "k",
          grid: [70000, 1, 1],
          args: [
            { space: "weight", name: "embed.codes" },
            { space: "workspace", name: "0" },
          ],
        },
      ],
    });
  });

  test("with what the manifest does not list is refused", () => {
    const withLaunch = (changes: object) => () => parse({ launches: [{ ...launch, ...changes }] });
    expect(withLaunch({ kernel: "x" })).toThrow(/names the kernel x/);
    expect(withLaunch({ args: ["weight:embed.codes"] })).toThrow(/gives k 1 arguments; it takes 2/);
    expect(withLaunch({ args: ["weight:embed.codes", "disk:b"] })).toThrow(/known spaces/);
    expect(withLaunch({ args: ["weight:other", "workspace:0"] })).toThrow(/"weight:other", which manifest/);
    expect(withLaunch({ args: ["weight:embed.codes", "workspace:1"] })).toThrow(
      /"workspace:1", which manifest/,
    );
    expect(withLaunch({ grid: [1, 1] })).toThrow(/not three extents/);
    expect(withLaunch({ grid: [1, 1, 0] })).toThrow(/integer ≥ 1/);
  });

  test("of another bucket is refused", () => {
    expect(() => parse({ size: 4 })).toThrow(/is the plan of step 4 1, not of step 1 1/);
    expect(() => parse({ rows: 4 })).toThrow(/is the plan of/);
    expect(() => parse({ function: "greedy" })).toThrow(/is the plan of greedy/);
  });
});
