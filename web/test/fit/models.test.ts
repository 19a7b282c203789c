import { afterAll, afterEach, beforeAll, describe, expect, test, vi } from "vitest";
import { openManifest } from "../../src/artifact/reader.js";
import { createEngine } from "../../src/here/index.js";
import { isSupported, modelUrl, readModels } from "../../src/models/index.js";
import { createEngine as createOnPage } from "../../src/page/index.js";
import { Meter } from "../../src/page/meter.js";
import type { ModelCard } from "../../src/protocol/messages.js";
import { type StaticServer, serve } from "../support/serve.js";
import { type ToyArtifact, toyArtifact } from "../support/toy-artifact.js";
import { toyWasm } from "../support/toy-wasm.js";

/** A server with the Hub's addresses: a model for WebAssembly at the tag v1, one for both in a folder. */
let server: StaticServer;
let wasm: ToyArtifact;
let webgpu: ToyArtifact;
beforeAll(async () => {
  wasm = await toyWasm(undefined, { packed: true });
  webgpu = toyArtifact({ features: ["shader-f16"] });
  const places: [string, ToyArtifact][] = [
    ["org/toy/resolve/v1/", wasm],
    ["org/toy/resolve/main/both/wasm/", wasm],
    ["org/toy/resolve/main/both/webgpu/", webgpu],
    ["gpu/", webgpu],
  ];
  server = await serve(async (path) => {
    const [place, artifact] = places.find(([folder]) => path.startsWith(folder)) ?? [];
    if (path.startsWith("lists/")) return new TextEncoder().encode(lists.get(path) ?? "<html>");
    return artifact?.files.get(path.slice(place?.length)) ?? null;
  });
});
/** Responses by path. */
const lists = new Map<string, string>();
afterEach(() => vi.unstubAllGlobals());
afterAll(() => server.close());

const sizeOf = ({ files }: ToyArtifact, folder: string): number =>
  [...files].reduce((sum, [path, bytes]) => sum + (path.startsWith(folder) ? bytes.length : 0), 0);

describe("addresses of models", () => {
  test("of the Hub", () => {
    const at = (model: string): string => modelUrl(model).href;
    expect(at("hf:org/model")).toBe("https://huggingface.co/org/model/resolve/main/");
    expect(at("hf:org/model@v1.2")).toBe("https://huggingface.co/org/model/resolve/v1.2/");
    expect(at("hf:org/model@abc/q4/webgpu/")).toBe("https://huggingface.co/org/model/resolve/abc/q4/webgpu/");
    expect(modelUrl("hf:org/model", "https://mirror.example/hub").href).toBe(
      "https://mirror.example/hub/org/model/resolve/main/",
    );
    expect(at("https://example.com/a/")).toBe("https://example.com/a/");
  });

  test.each([
    "hf:",
    "hf:model",
    "hf:a/b@",
    "hf:a/b@v1@v2",
    "hf:a/../b",
    "hf:a/b/../../c",
    "hf:a/b?c",
    "hf:../b",
  ])("%s is none", (model) =>
    expect(() => modelUrl(model)).toThrow(/not a model of the Hub: it must be hf:OWNER\/NAME/),
  );

  test("a model is loaded from a server with the Hub's addresses", async () => {
    const engine = await createEngine(modelUrl("hf:org/toy@v1", server.url));
    expect(engine.model.name).toBe("toy");
    await engine.dispose();
  });

  test("createEngine asks the Hub itself", async () => {
    const asked: string[] = [];
    vi.stubGlobal("fetch", async (url: URL) => {
      asked.push(String(url));
      return new Response(null, { status: 404 });
    });
    await expect(createEngine("hf:org/toy@v1")).rejects.toMatchObject({ name: "ArtifactError" });
    expect(asked).toContain("https://huggingface.co/org/toy/resolve/v1/manifest.json");
    await expect(
      createOnPage("hf:org", { worker: () => expect.fail("no worker is needed") }),
    ).rejects.toThrow(/not a model of the Hub/);
  });
});

/** A GPU with only the properties that a prediction reads. */
function gpuWith(features: readonly string[], maxStorageBufferBindingSize = 2 ** 27): void {
  const info = { vendor: "intel", architecture: "", device: "", description: "", isFallbackAdapter: false };
  const limits = { maxStorageBuffersPerShaderStage: 8, maxStorageBufferBindingSize, maxBufferSize: 2 ** 28 };
  const adapter = { features: new Set(features), limits, info };
  vi.stubGlobal("navigator", { userAgent: "", gpu: { requestAdapter: async () => adapter } });
}

describe("isSupported", () => {
  const both = () => modelUrl("hf:org/toy/both", server.url);

  test("tells what the load then comes to, and fetches the manifest alone", async () => {
    server.requests.length = 0;
    const told = await isSupported(modelUrl("hf:org/toy@v1", server.url));
    expect(server.requests).toEqual(["org/toy/resolve/v1/manifest.json"]);
    expect(told).toMatchObject({
      supported: true,
      backend: "wasm",
      name: "toy",
      quantization: "none",
      license: null,
      weightBytes: sizeOf(wasm, "weights/"),
      downloadBytes:
        sizeOf(wasm, "weights/") +
        sizeOf(wasm, "packs/tokenizer.bin") +
        sizeOf(wasm, `packs/program-${told.program}.bin`),
    });
    const engine = await createEngine(modelUrl("hf:org/toy@v1", server.url));
    expect(told.contextLength).toBe(engine.model.contextLength);
    await engine.dispose();
  });

  test("tells how long the first load takes where the browser tells its connection", async () => {
    const at = modelUrl("hf:org/toy@v1", server.url);
    const entries = vi.spyOn(performance, "getEntriesByName").mockReturnValue([]);
    const unknown = await isSupported(at);
    expect(unknown).toMatchObject({ downloadSeconds: null, loadSeconds: null, basis: { download: null } });
    vi.stubGlobal("navigator", { userAgent: "", connection: { downlink: 2 } });
    const { downloadSeconds, compileSeconds, loadSeconds, downloadBytes, basis } = await isSupported(at);
    expect(downloadSeconds).toBeCloseTo(downloadBytes / 250_000);
    expect(basis).toEqual({ download: "connection", compile: "estimate" });
    expect(compileSeconds).toBeGreaterThan(0);
    expect(loadSeconds).toBeCloseTo((downloadSeconds ?? 0) + (compileSeconds ?? 0));
    entries.mockRestore();
  });

  test("tells it by what the manifest came with, where that is more than the connection is said to have", async () => {
    const at = modelUrl("hf:org/toy@v1", server.url);
    vi.stubGlobal("navigator", { userAgent: "", connection: { downlink: 1 } });
    const entry = { transferSize: 50_000, requestStart: 100, responseEnd: 200 };
    const entries = vi.spyOn(performance, "getEntriesByName").mockReturnValue([entry as never]);
    const told = await isSupported(at);
    expect(entries).toHaveBeenCalledWith(new URL("manifest.json", at).href, "resource");
    expect(told).toMatchObject({
      downloadSeconds: told.downloadBytes / 500_000,
      basis: { download: "manifest" },
    });
    entry.transferSize = 300; // from a cache
    expect((await isSupported(at)).basis.download).toBe("connection");
    entries.mockRestore();
  });

  test("tells it by what first loads from there, and on this adapter, have taken", async () => {
    const kept = new Map<string, string>();
    const getItem = (key: string): string | null => kept.get(key) ?? null;
    vi.stubGlobal("document", {});
    vi.stubGlobal("localStorage", { getItem, setItem: (key: string, value: string) => kept.set(key, value) });
    gpuWith(["shader-f16"]);
    const at = new URL("gpu/", server.url);
    expect((await isSupported(at)).basis.compile).toBe("estimate");
    const clock = vi.spyOn(performance, "now");
    const load = (cached: number): void => {
      const meter = new Meter();
      const total = 2_000_000;
      for (const [ms, loaded] of [
        [0, 500_000],
        [500, 1_000_000],
        [3000, total],
      ] as const) {
        clock.mockReturnValue(ms);
        meter.hear({ phase: "weights", loaded, cached: Math.min(cached, loaded), total });
      }
      for (const [ms, compiled] of [
        [4000, 1],
        [4100, 2],
        [5000, 11],
      ] as const) {
        clock.mockReturnValue(ms);
        meter.hear({ phase: "kernels", compiled, total: 11 });
      }
      meter.keep(at, { adapter: "intel" } as ModelCard, cached < total);
    };
    load(2_000_000);
    expect(kept.size).toBe(0);
    load(0);
    clock.mockRestore();
    const told = await isSupported(at);
    expect(told.basis).toEqual({ download: "loads", compile: "loads" });
    expect(told.downloadSeconds).toBeCloseTo(told.downloadBytes / 500_000);
    const { programs } = await openManifest(new TextDecoder().decode(webgpu.files.get("manifest.json")));
    const { size = 0 } = programs.find(({ name }) => name === told.program)?.kernels ?? {};
    expect(told.compileSeconds).toBeCloseTo(0.1 * size);
    expect(told.loadSeconds).toBe(Math.max(told.downloadSeconds ?? 0, told.compileSeconds ?? 0));
  });

  test("less memory is less context, and too little is none", async () => {
    const text = new TextDecoder().decode(wasm.files.get("manifest.json"));
    const { cache, caches } = await openManifest(text);
    // Keys and values of one page, in float32.
    const page = cache.pageSize * (caches[0]?.headDim ?? 0) * 4;
    const at = modelUrl("hf:org/toy@v1", server.url);
    const little = await isSupported(at, { kvMemory: 10 * page * 2 });
    const engine = await createEngine(at, { kvMemory: 10 * page * 2 });
    expect(little.contextLength).toBe(engine.model.contextLength);
    await engine.dispose();
    const none = await isSupported(at, { kvMemory: page, contextLength: 256 });
    expect(none).toMatchObject({ supported: false, backend: null, contextLength: 0 });
    expect(none.reason).toMatch(/context of 256 tokens needs/);
  });

  test("a GPU that can, one that cannot, and none", async () => {
    gpuWith(["shader-f16"]);
    expect(await isSupported(both())).toMatchObject({ supported: true, backend: "webgpu", program: "f32" });
    gpuWith([]);
    expect(await isSupported(both())).toMatchObject({ supported: true, backend: "wasm" });
    const unable = await isSupported(new URL("gpu/", server.url));
    expect(unable).toMatchObject({ supported: false, reason: expect.stringContaining("shader-f16") });
    vi.unstubAllGlobals();
    expect(await isSupported(both())).toMatchObject({ supported: true, backend: "wasm" });
    const without = await isSupported(new URL("gpu/", server.url));
    expect(without).toMatchObject({ supported: false, code: "webgpu-missing" });
  });

  test("no model there, and an abort", async () => {
    await expect(isSupported(new URL("nowhere/", server.url))).rejects.toMatchObject({
      name: "ArtifactError",
    });
    const signal = AbortSignal.abort();
    await expect(isSupported(both(), { signal })).rejects.toMatchObject({ name: "AbortError" });
  });
});

describe("a list of models", () => {
  const read = (list: unknown) => {
    lists.set("lists/models.json", JSON.stringify(list));
    return readModels(new URL("lists/models.json", server.url));
  };
  const toy = { name: "Toy", model: "../org/toy/resolve/v1/", bytes: 4000 };

  test("gives models that load", async () => {
    const needs = { backends: ["webgpu"], memory: 5000 };
    const models = await read({
      models: [toy, { name: "Hub", model: "hf:a/b@v2", bytes: 7, needs, contextLength: 9, license: "mit" }],
    });
    expect(models).toMatchObject([
      { name: "Toy", bytes: 4000, needs: { backends: ["webgpu", "wasm"], memory: null }, license: null },
      { name: "Hub", needs, contextLength: 9, license: "mit", description: null },
    ]);
    expect(models[1]?.url.href).toBe("https://huggingface.co/a/b/resolve/v2/");
    expect(await isSupported(models[0]?.url ?? "")).toMatchObject({ supported: true, name: "toy" });
  });

  test.each([
    [[], "should be an object, but is"],
    [{}, ": models should be a list"],
    [{ models: [{ ...toy, bytes: "4 MB" }] }, 'models[0].bytes should be an integer above 0, but is "4 MB"'],
    [{ models: [{ ...toy, size: 4 }] }, "models[0] should be an object of name, model"],
    [{ models: [toy, { ...toy, name: "" }] }, "models[1].name should be a text"],
    [
      { models: [{ ...toy, needs: { backends: ["cuda"] } }] },
      "needs.backends should be a list of webgpu and wasm",
    ],
    [{ models: [{ ...toy, model: "hf:a" }] }, "not a model of the Hub"],
  ])("%j is refused by name", async (list, message) => {
    await expect(read(list)).rejects.toThrow(message);
  });

  test("a page instead of it", async () => {
    await expect(readModels(new URL("lists/none.json", server.url))).rejects.toMatchObject({
      code: "not-an-artifact",
    });
  });
});
