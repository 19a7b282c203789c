/** Errors for programs: the code of a failure is kept from the worker to the page. */

import { readdirSync, readFileSync } from "node:fs";
import { afterEach, describe, expect, test, vi } from "vitest";
import { findArtifacts } from "../src/artifact/artifacts.js";
import { modelUrl } from "../src/artifact/places.js";
import { parseManifest } from "../src/artifact/reader.js";
import { createEngine } from "../src/here/index.js";
import { isSupported } from "../src/models/index.js";
import { deleteModel } from "../src/page/cached.js";
import { checkEngineOptions } from "../src/page/options.js";
import {
  ArtifactError,
  DeviceError,
  DeviceLostError,
  type ErrorCode,
  fromErrorRecord,
  OutOfMemoryError,
  RequestError,
  toErrorRecord,
  UnreachableError,
} from "../src/protocol/errors.js";
import { fetchText, MissingError } from "../src/storage/http.js";
import { SequenceTable } from "../src/worker/cache/sequence-table.js";
import { Scheduler } from "../src/worker/engine/scheduler.js";
import { findGpu } from "../src/worker/gpu/adapter.js";
import { Pipelines } from "../src/worker/gpu/pipelines.js";
import { sampleManifest } from "./support/manifest.js";

const SOURCE = new URL("../src/", import.meta.url);
const text = (path: string): string => readFileSync(new URL(path, SOURCE), "utf8");

/** The members of the union, read from its source. */
function codes(): string[] {
  const union = /export type ErrorCode =([^;]*);/.exec(text("protocol/errors.ts"))?.[1] ?? "";
  return [...union.matchAll(/\| "([a-z-]+)"/g)].map(([, code]) => code ?? "").sort();
}

async function failure(action: () => unknown): Promise<{ code: ErrorCode; message: string }> {
  try {
    await action();
  } catch (error) {
    return error as DeviceError;
  }
  throw new Error("nothing failed");
}

describe("the codes of errors", () => {
  test("are all in the documentation, and no others", () => {
    const page = readFileSync(new URL("../docs/errors.md", SOURCE), "utf8");
    const documented = [...page.matchAll(/^\| `([a-z-]+)` +\|/gm)].map(([, code]) => code).sort();
    expect(documented).toEqual(codes());
    expect(new Set(documented).size).toBe(documented.length);
  });

  test("are all said somewhere", () => {
    const files = readdirSync(SOURCE, { recursive: true, encoding: "utf8" });
    const all = files.filter((file) => file.endsWith(".ts")).map((file) => text(file).replace(/\| "/g, ""));
    for (const code of codes()) expect(all.join("\n"), code).toContain(`"${code}"`);
  });

  test("stay what they are on the way from the worker", () => {
    const errors = [
      new ArtifactError("a"),
      new ArtifactError("a", { code: "not-an-artifact" }),
      new UnreachableError("a"),
      new MissingError("a"),
      new DeviceError("d", { code: "no-adapter" }),
      new DeviceLostError("d"),
      new OutOfMemoryError("d"),
      new RequestError("r", "n"),
      new RequestError("r", "messages", { code: "context-overflow" }),
    ];
    for (const error of errors) {
      const back = fromErrorRecord(structuredClone(toErrorRecord(error)));
      expect(back).toMatchObject({ name: error.name, code: error.code, message: error.message });
      expect((back as RequestError).param).toBe((error as RequestError).param);
    }
    expect(fromErrorRecord(toErrorRecord(new TypeError("x is not a function")))).toMatchObject({
      code: "internal",
      message: expect.stringContaining("x is not a function"),
    });
  });
});

describe("the code tells", () => {
  afterEach(() => vi.unstubAllGlobals());

  test("a browser without WebGPU from one without an adapter", async () => {
    vi.stubGlobal("navigator", {});
    expect(await failure(findGpu)).toMatchObject({
      code: "webgpu-missing",
      message: expect.stringContaining("WebGPU is missing"),
    });
    vi.stubGlobal("navigator", { gpu: { requestAdapter: async () => null } });
    const none = await failure(findGpu);
    expect(none.code).toBe("no-adapter");
    expect(none.message).toContain("no GPU");
    expect(none.message).not.toContain("is missing");
  });

  test("a file that is not there from a server that cannot be reached, and from one that fails", async () => {
    const codeOf = async (answer: () => Promise<Response>): Promise<ErrorCode> => {
      const load = (): Promise<string> => fetchText(new URL("http://a/b"), null, { fetch: answer });
      return (await failure(load)).code;
    };
    expect(await codeOf(async () => new Response("", { status: 404 }))).toBe("not-found");
    expect(await codeOf(async () => new Response("", { status: 503 }))).toBe("unreachable");
    expect(await codeOf(() => Promise.reject(new TypeError("Failed to fetch")))).toBe("unreachable");
  });

  test("what is not an artifact, and what is one of another version or damaged", async () => {
    const page = async (): Promise<Response> => new Response("<!doctype html><html></html>");
    const html = await failure(() => findArtifacts(new URL("http://a/b/"), undefined, { fetch: page }));
    expect(html.code).toBe("not-an-artifact");
    expect(html.message).toContain("HTML");
    const parsed = (value: unknown) => failure(() => parseManifest(JSON.stringify(value)));
    expect((await failure(() => parseManifest("{"))).code).toBe("not-an-artifact");
    expect((await parsed({ format: "other" })).code).toBe("not-an-artifact");
    expect((await parsed({ ...sampleManifest(), version: 9999 })).code).toBe("artifact-unsuitable");
    expect((await parsed({ ...sampleManifest(), target: "mlx" })).code).toBe("artifact-unsuitable");
    expect((await parsed({ ...sampleManifest(), weights: 1 })).code).toBe("artifact-damaged");
  });

  test("a GPU process that died from a kernel that does not compile", async () => {
    vi.stubGlobal("GPUShaderStage", { COMPUTE: 4 });
    const made = async (message: string, lost: boolean) => {
      let lose: (info: object) => void = () => undefined;
      const device = {
        lost: new Promise((resolve) => {
          lose = resolve;
        }),
        createBindGroupLayout: () => ({}),
        createPipelineLayout: () => ({}),
        createShaderModule: () => ({}),
        pushErrorScope: () => undefined,
        popErrorScope: async () => null,
        createComputePipelineAsync: async () => {
          if (lost) lose({ reason: "unknown", message: "" });
          throw new Error(message);
        },
      };
      const shader = { code: "", entry: "main", access: [] };
      const pipelines = new Pipelines(device as unknown as GPUDevice, new Map([["k", shader]]));
      return failure(() => pipelines.compile("k"));
    };
    const gone = "A valid external Instance reference no longer exists.";
    expect(await made(gone, false)).toMatchObject({ code: "device-lost", name: "DeviceError" });
    expect(await made(gone, false)).toBeInstanceOf(DeviceLostError);
    expect((await made("whatever the driver says", true)).code).toBe("device-lost");
    const wrong = await made("error: unresolved identifier", false);
    expect(wrong.code).toBe("device-unsuitable");
    expect(wrong.message).toContain("does not compile");
  });

  test("a conversation that is too long, with advice that fits its cause", async () => {
    const scheduler = (most: number): Scheduler =>
      new Scheduler(new SequenceTable([40], 4, 4, [null]), [{ size: 16, logits: 8 }], 96, most);
    const byModel = await failure(() => scheduler(96).limitTokens(100, null));
    expect(byModel).toMatchObject({ code: "context-overflow", param: "messages" });
    expect(byModel.message).toContain("the model's own limit");
    expect(byModel.message).not.toContain("kvMemory");
    const byMemory = await failure(() => scheduler(1024).limitTokens(100, null));
    expect(byMemory.code).toBe("context-overflow");
    expect(byMemory.message).toContain("kvMemory");
    expect(byMemory.message).toContain("1024");
  });
});

test.each([undefined, null, "", 5, {}])("an address of a model that is %s is refused as such", (model) => {
  expect(() => modelUrl(model as never)).toThrow(/address of the model is (empty|undefined|null|5|\{\}):/);
});

test.each([
  ["http://x/models/toy", "http://x/models/toy/"],
  ["http://x/models/toy/#part", "http://x/models/toy/"],
  [new URL("http://x/models/toy"), "http://x/models/toy/"],
  ["hf:me/toy@v1/both", "https://huggingface.co/me/toy/resolve/v1/both/"],
])("%s is the folder %s, for all that take a model's address", (model, folder) => {
  expect(modelUrl(model).href).toBe(folder);
});

test("an address with a query is refused: its files would not get it", async () => {
  const signed = "http://x/models/toy/?signature=abc";
  for (const take of [createEngine, isSupported, deleteModel, async (url: string) => modelUrl(url)])
    await expect(take(signed)).rejects.toMatchObject({ name: "RequestError", param: "url" });
});

test("all code that is loaded when it is wanted comes through `later`, which gives an error with a code", () => {
  const root = new URL("../src/", import.meta.url);
  const files = readdirSync(root, { recursive: true, encoding: "utf8" }).filter((name) =>
    name.endsWith(".ts"),
  );
  const bare = files.filter((name) => {
    const text = readFileSync(new URL(name, root), "utf8");
    const all = text.match(/(?<!typeof )\bimport\(/g) ?? [];
    return all.length > (text.match(/\blater\(\s*\(\) => import\(/g) ?? []).length;
  });
  expect(bare).toEqual([]);
});
test.each(["cuda", 5, "toString"])(
  "a backend that is %s is rejected, and the error names the known ones",
  (backend) => {
    expect(() => checkEngineOptions({ backend })).toThrow(/^backend must be webgpu or wasm, not /);
  },
);
