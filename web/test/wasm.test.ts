import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { afterEach, describe, expect, onTestFinished, test, vi } from "vitest";
import { findArtifacts } from "../src/artifact/artifacts.js";
import type { Manifest } from "../src/artifact/manifest.js";
import { parseManifest } from "../src/artifact/reader.js";
import type { AnswerEvent, BackendChoice, LoadProgress, LoadSettings } from "../src/protocol/messages.js";
import type { SamplingOptions } from "../src/protocol/openai.js";
import type { Host } from "../src/worker/host.js";
import { parts } from "../src/worker/parts/index.js";
import { Session } from "../src/worker/session/session.js";
import { ATOMICS, ableProgram } from "../src/worker/wasm/features.js";
import { makeRoom } from "../src/worker/wasm/room.js";
import { expectedTokens } from "./support/fake-backend.js";
import { TOY_VOCAB, type ToyArtifact, toyArtifact } from "./support/toy-artifact.js";
import { REFUSED, TRAPS, toyWasm } from "./support/toy-wasm.js";

const BASE = new URL("http://toy.example/");
const artifact = await toyWasm();

/** Answers from memory, by the path within the server. */
function fetcher(files: ReadonlyMap<string, Uint8Array>) {
  return async (url: URL): Promise<Response> => {
    const found = files.get(url.pathname.slice(1));
    return new Response(found ? Uint8Array.from(found) : null, { status: found ? 200 : 404 });
  };
}

function under(folder: string, { files }: ToyArtifact): [string, Uint8Array][] {
  return [...files].map(([path, bytes]) => [`${folder}${path}`, bytes]);
}

/** Loads a session of one thread, with the progress that it reported. */
async function load(
  files: ReadonlyMap<string, Uint8Array> = artifact.files,
  settings: LoadSettings = {},
  spawn: Host["spawn"] = null,
  progress: LoadProgress[] = [],
) {
  const warnings: string[] = [];
  const session = await Session.load(BASE, settings, {
    signal: new AbortController().signal,
    load: "this",
    hasLeft: async () => false,
    onProgress: (event) => progress.push(event),
    onWarning: (message) => warnings.push(message),
    onCard: () => undefined,
    onLost: () => undefined,
    host: { fetch: fetcher(files), spawn, grammars: null, hardwareThreads: 4 },
    parts,
  });
  return { session, progress, warnings };
}

let nextId = 1;

/** An answer as its text, or its error. */
function ask(session: Session, text: string, options: SamplingOptions = {}): Promise<string> {
  return new Promise((resolve) => {
    let said = "";
    const tell = (event: AnswerEvent): void => {
      if (event.event === "delta") said += event.text;
      if (event.event === "end") resolve(said);
      if (event.event === "error") resolve(`${event.error.kind}: ${event.error.message}`);
    };
    const prompt = { kind: "text", text } as const;
    const asked = { temperature: 0, max_tokens: 30, ...options };
    session.generate(nextId++, { prompt, options: asked, n: 1, logprobs: null }, tell);
  });
}

/** The text that the toy model gives after `prompt`. */
function expected(prompt: string, count = 30): string {
  const ids = prompt === "" ? [0] : [...prompt].map((character) => character.charCodeAt(0) - 31);
  return expectedTokens(ids, count, TOY_VOCAB)
    .map((id) => (id === 0 || id === 96 ? "" : String.fromCharCode(id + 31)))
    .join("");
}

/** A function that collects all garbage at once. */
function collector(): () => void {
  setFlagsFromString("--expose-gc");
  return runInNewContext("gc") as () => void;
}

const characterOf = (token: number): string => String.fromCharCode(token + 31);

/** A prompt whose answer has neither of the tokens at which the toy's kernels fail. */
function harmless(from: string): string {
  const isHarmless = (prompt: string): boolean =>
    ![TRAPS, REFUSED].some((token) => expected(prompt).includes(characterOf(token)));
  for (let i = 0; ; i++) if (isHarmless(`${from}${i}`)) return `${from}${i}`;
}

afterEach(() => {
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

describe("a model in WebAssembly", () => {
  test("answers as the model does, several at once, and tells what it runs on", async () => {
    const { session, progress } = await load();
    const prompts = ["", "H", "Hello", "x".repeat(100)].map(harmless);
    expect(await Promise.all(prompts.map((prompt) => ask(session, prompt)))).toEqual(
      prompts.map((prompt) => expected(prompt)),
    );
    const backend: BackendChoice = { name: "wasm", why: "only", reason: expect.any(String) };
    expect(progress).toContainEqual({ phase: "backend", backend });
    expect(session.card()).toMatchObject({ backend, program: "toy", adapter: "WebAssembly, 1 thread" });
    expect(session.stats()).toMatchObject({ backend, threads: 1, gpuBytes: 0, launchesPerToken: 3 });
    expect(session.stats().wasmBytes).toBeGreaterThan(2 ** 21);
    session.dispose();
    expect(session.stats()).toMatchObject({ threads: 0, wasmBytes: 0 });
  });

  test("finds a common beginning computed, and gives one text for one seed", async () => {
    const { session } = await load();
    const prompt = harmless("a common beginning that is long enough");
    const first = await ask(session, prompt, { temperature: 1, seed: 5 });
    expect(await ask(session, prompt, { temperature: 1, seed: 5 })).toBe(first);
    expect(session.stats().last?.cachedTokens).toBeGreaterThan(16);
    session.dispose();
  });

  test("lets others in between steps: an abort ends an answer", async () => {
    const { session } = await load();
    const told: AnswerEvent["event"][] = [];
    const prompt = { kind: "text", text: harmless("a") } as const;
    const options = { temperature: 0, max_tokens: 200 };
    session.generate(99, { prompt, options, n: 1, logprobs: null }, ({ event }) => told.push(event));
    await new Promise((resolve) => setTimeout(resolve, 2));
    session.abort(99);
    const before = told.length;
    await new Promise((resolve) => setTimeout(resolve, 20));
    expect(told.slice(before)).toEqual([]);
    expect(told).not.toContain("end");
    session.dispose();
  });

  test.each([
    [TRAPS, /^device: A kernel of step\.\d+ trapped \(RuntimeError: unreachable/],
    [REFUSED, /^device: The kernel append_\d+ of step\.\d+ failed: the toy refuses this token/],
  ])(
    "a kernel that fails at token %i ends requests by name, and the next one is answered afresh",
    async (token, named) => {
      const { session } = await load();
      const prompt = harmless("a common beginning that is long enough");
      expect(await ask(session, prompt)).toBe(expected(prompt));
      const neighbour = ask(session, harmless("beside"), { max_tokens: 200 });
      expect(await ask(session, `${prompt}${characterOf(token)}`)).toMatch(named);
      expect(await neighbour).toMatch(named);
      expect(await ask(session, prompt)).toBe(expected(prompt));
      // No page of the failed memory is found again.
      expect(session.stats().last?.cachedTokens).toBe(0);
      session.dispose();
      // The figures are those of the present memory, also after it was made again.
      expect(session.stats()).toMatchObject({ reopened: 1, threads: 0, wasmBytes: 0 });
    },
  );

  test.each([[TRAPS], [REFUSED]])(
    "lets go of the memory that a kernel has broken at token %i before it takes another",
    async (token) => {
      const collect = collector();
      const taken: WeakRef<WebAssembly.Memory>[] = [];
      const living: number[] = [];
      const { Memory } = WebAssembly;
      class Watched extends Memory {
        constructor(descriptor: WebAssembly.MemoryDescriptor) {
          collect();
          living.push(taken.filter((memory) => memory.deref() !== undefined).length);
          super(descriptor);
          taken.push(new WeakRef(this));
        }
      }
      vi.stubGlobal("WebAssembly", Object.assign(Object.create(WebAssembly), { Memory: Watched }));
      const { session } = await load();
      const prompt = harmless("a");
      for (let i = 0; i < 2; i++)
        expect(await ask(session, `${prompt}${characterOf(token)}`)).toMatch(/^device: /);
      expect(await ask(session, prompt)).toBe(expected(prompt));
      expect(living).toEqual([0, 0, 0]);
      session.dispose();
    },
  );

  test("loads where signals cannot be joined, as in browsers before WebGPU's", async () => {
    const { any } = AbortSignal;
    Reflect.set(AbortSignal, "any", undefined);
    onTestFinished(() => void Reflect.set(AbortSignal, "any", any));
    const { session } = await load();
    expect(await ask(session, harmless("a"))).toBe(expected(harmless("a")));
    session.dispose();
  });

  test("tells what each launch costs", async () => {
    const { session } = await load();
    const { launches, program } = await session.profile({ rows: 16, context: 20, rounds: 2 });
    expect(program).toBe("toy");
    expect(launches.map(({ kernel, weightBytes }) => [kernel, weightBytes])).toEqual([
      ["append_16", 0],
      ["look_16", 1200],
    ]);
    session.dispose();
  });

  /** Makes memories of more than `most` bytes impossible, as in a browser that is short of memory. */
  function limitMemory(most: number): void {
    const { Memory } = WebAssembly;
    class Limited extends Memory {
      constructor(descriptor: WebAssembly.MemoryDescriptor) {
        if (descriptor.initial * 65536 > most) throw new RangeError("could not allocate memory");
        super(descriptor);
      }
    }
    vi.stubGlobal("WebAssembly", Object.assign(Object.create(WebAssembly), { Memory: Limited }));
  }

  test("says how many bytes it wanted where memory is refused", async () => {
    const { session: whole } = await load();
    const { cachePages, wasmBytes } = whole.stats();
    whole.dispose();
    const kvMemory = cachePages * 64;
    limitMemory(wasmBytes - 1);
    const refused = load(artifact.files, { kvMemory });
    await expect(refused).rejects.toThrow(
      new RegExp(
        `no WebAssembly memory of ${wasmBytes} bytes: could not allocate memory.* the KV cache ${kvMemory}`,
      ),
    );
    await expect(load()).rejects.toThrow(/no WebAssembly memory of \d+ bytes/);
  });

  test("takes less of a cache where memory is refused and the cache's size was left open", async () => {
    const manifest = parseManifest(new TextDecoder().decode(artifact.files.get("manifest.json")));
    const program = manifest.programs.find(({ name }) => name === "toy");
    if (!program) throw new Error("the toy has no program toy");
    // Pages of 64 KiB, for keys and for values: 16 MiB for two sequences.
    const shape = ["pages.0", 1, 4, 4096] as const;
    const buffers = manifest.buffers.map((each) => (each.dtype === "kv" ? { ...each, shape } : each));
    const plans = { step: new Map(), greedy: new Map(), sample: new Map(), logprobs: new Map() };
    const room = (options: { readonly kvMemory?: number }) =>
      makeRoom({ ...manifest, buffers }, program, plans, { ...options, threads: 1, shared: false });
    expect((await room({})).plan).toMatchObject({ pages: [128], contextLength: 256 });
    limitMemory(12 * 2 ** 20);
    expect((await room({})).plan).toMatchObject({ pages: [64], contextLength: 256 });
    await expect(room({ kvMemory: 16 * 2 ** 20 })).rejects.toThrow(/no WebAssembly memory of \d+ bytes/);
  });

  test("refuses a module that is not the build's, or has other kernels", async () => {
    const files = new Map(artifact.files);
    const library = "kernels/toy/model.wasm";
    files.set(library, Uint8Array.from([...(files.get(library) ?? []), 0]));
    await expect(load(files)).rejects.toThrow(/model\.wasm is corrupt/);
  });

  test("says what a program lacks, and what there is beside one that was asked for", async () => {
    await expect(load(artifact.files, { program: "toy-threads" })).rejects.toThrow(
      /^WebAssembly cannot run the model here, because it lacks toy-threads: atomics/,
    );
    await expect(load(artifact.files, { program: "other" })).rejects.toThrow(
      "The artifact has the programs toy-threads, toy, not other.",
    );
    await expect(load(artifact.files, { threads: 0 })).rejects.toThrow(/threads is 0; give an integer/);
  });

  test("says why fewer threads compute than were asked for", async () => {
    const never = () => {
      throw new Error("no thread is started");
    };
    const here = await load(artifact.files, { threads: 4 });
    expect(here.warnings).toEqual([
      expect.stringMatching(/^One thread computes, not 4: there are no workers/),
    ]);
    expect((await load(artifact.files, { threads: 1 })).warnings).toEqual([]);
    expect((await load()).warnings).toEqual([]);
    const shared = globalThis.SharedArrayBuffer;
    vi.stubGlobal("SharedArrayBuffer", undefined);
    const { warnings } = await load(artifact.files, { threads: 2 }, never);
    vi.stubGlobal("SharedArrayBuffer", shared);
    expect(warnings).toEqual([expect.stringMatching(/not 2: memory cannot be shared.*Cross-Origin-Opener/)]);
  });

  test("says how a page gets the shared memory that a program needs", () => {
    const requires = { arch: "wasm32", system: "any", features: ["simd128", ATOMICS], limits: {} };
    const manifest = { programs: [{ name: "threads", requires }] } as unknown as Manifest;
    expect(() => ableProgram(manifest, new Set(["simd128"]), 2)).toThrow(
      /threads: atomics\. Serve the page with.*Cross-Origin-Embedder-Policy/,
    );
    expect(() => ableProgram(manifest, new Set(), 2)).toThrow(/simd128, atomics\. Use a newer browser/);
  });

  test("says that a page's policy forbids WebAssembly", async () => {
    const compile = async (): Promise<never> => {
      throw new WebAssembly.CompileError("Wasm code generation disallowed by embedder");
    };
    vi.stubGlobal("WebAssembly", Object.assign(Object.create(WebAssembly), { compile }));
    await expect(load()).rejects.toThrow(/disallowed by embedder\).*'wasm-unsafe-eval' in script-src/);
  });
});

describe("a folder with artifacts for both backends", () => {
  const AMPLE = { maxStorageBuffersPerShaderStage: 8, maxStorageBufferBindingSize: 2 ** 27 };

  /** A browser with one adapter, which has this `info` and opens no device. */
  function stubGpu(info: Partial<GPUAdapterInfo>, limits: object = AMPLE): void {
    const described = { vendor: "", architecture: "", device: "", description: "", isFallbackAdapter: false };
    const requestDevice = async (): Promise<never> => {
      throw new DOMException("out of luck", "OperationError");
    };
    const adapter = { info: { ...described, ...info }, features: new Set(), limits, requestDevice };
    vi.stubGlobal("navigator", { userAgent: "", gpu: { requestAdapter: async () => adapter } });
  }

  const backendsIn = (progress: readonly LoadProgress[]): BackendChoice[] =>
    progress.flatMap((event) => (event.phase === "backend" ? [event.backend] : []));

  const both = new Map([...under("webgpu/", toyArtifact()), ...under("wasm/", artifact)]);

  test("runs in WebAssembly where there is no GPU, and says why", async () => {
    const { session } = await load(both);
    const why = { name: "wasm", why: "no-gpu", reason: expect.stringMatching(/^WebGPU is missing/) };
    expect(session.card().backend).toEqual(why);
    expect(await ask(session, harmless("a"))).toBe(expected(harmless("a")));
    session.dispose();
  });

  test("runs in what is asked for", async () => {
    const { session } = await load(both, { backend: "wasm" });
    expect(session.card().backend).toMatchObject({ name: "wasm", why: "pinned" });
    session.dispose();
    await expect(load(both, { backend: "webgpu" })).rejects.toThrow(/^WebGPU is missing/);
    await expect(load(artifact.files, { backend: "webgpu" })).rejects.toThrow(
      /built for wasm, not webgpu.*--target webgpu/,
    );
  });

  test("goes on in WebAssembly where the GPU cannot run it", async () => {
    stubGpu({ vendor: "nvidia", description: "small" }, { maxStorageBuffersPerShaderStage: 4 });
    const { session, progress } = await load(both);
    expect(backendsIn(progress)).toEqual([
      { name: "webgpu", why: "gpu", reason: "small" },
      { name: "wasm", why: "failed", reason: expect.stringMatching(/^This GPU cannot run the model/) },
    ]);
    expect(await ask(session, harmless("a"))).toBe(expected(harmless("a")));
    session.dispose();
  });

  test("goes on in WebAssembly where the adapter opens no device", async () => {
    stubGpu({ vendor: "nvidia", description: "ill" });
    const { session, progress } = await load(both);
    expect(backendsIn(progress)).toEqual([
      { name: "webgpu", why: "gpu", reason: "ill" },
      { name: "wasm", why: "failed", reason: expect.stringMatching(/opens no device: out of luck\./) },
    ]);
    expect(await ask(session, harmless("a"))).toBe(expected(harmless("a")));
    session.dispose();
  });

  test("tries a processor that plays a GPU where WebAssembly is refused", async () => {
    stubGpu({ vendor: "google", architecture: "swiftshader", isFallbackAdapter: true });
    const compile = async (): Promise<never> => {
      throw new WebAssembly.CompileError("Wasm code generation disallowed by embedder");
    };
    vi.stubGlobal("WebAssembly", Object.assign(Object.create(WebAssembly), { compile }));
    const progress: LoadProgress[] = [];
    await expect(load(both, {}, null, progress)).rejects.toThrow(/opens no device/);
    expect(backendsIn(progress)).toEqual([
      { name: "wasm", why: "software", reason: expect.stringContaining("swiftshader") },
      { name: "webgpu", why: "failed", reason: expect.stringContaining("'wasm-unsafe-eval'") },
    ]);
  });

  test("leaves a processor that plays a GPU alone", async () => {
    stubGpu({ vendor: "google", architecture: "swiftshader", isFallbackAdapter: true });
    const { session } = await load(both);
    expect(session.card().backend).toMatchObject({ name: "wasm", why: "software" });
    session.dispose();
  });

  test("is looked at again where one half cannot be reached, and not taken for the other alone", async () => {
    const failing = (times: number) => {
      const answer = fetcher(both);
      return async (url: URL): Promise<Response> => {
        if (url.pathname === "/webgpu/manifest.json" && times-- > 0) throw new TypeError("network changed");
        return answer(url);
      };
    };
    const artifacts = await findArtifacts(BASE, undefined, { fetch: failing(1) });
    expect([...artifacts.keys()].sort()).toEqual(["wasm", "webgpu"]);
    await expect(findArtifacts(BASE, undefined, { fetch: failing(2) })).rejects.toThrow(
      /webgpu\/manifest\.json cannot be downloaded: network changed/,
    );
  });

  test("is asked for by what the server lists of the folder, and by nothing that it lacks", async () => {
    const listing = (...targets: string[]): Uint8Array =>
      new TextEncoder().encode(JSON.stringify({ format: "nearfar-targets", targets }));
    const asked: string[] = [];
    const find = (files: ReadonlyMap<string, Uint8Array>, integrity?: string) =>
      findArtifacts(BASE, undefined, {
        integrity,
        fetch: async (url) => {
          asked.push(url.pathname);
          return fetcher(files)(url);
        },
      });
    const found = await find(new Map([...both, ["manifest.json", listing("cpu", "wasm")]]));
    expect([...found.keys()]).toEqual(["wasm"]);
    expect(asked).toEqual(["/manifest.json", "/wasm/manifest.json"]);
    await expect(find(new Map([["manifest.json", listing("cpu", "mlx")]]))).rejects.toMatchObject({
      message: expect.stringMatching(/lists cpu, mlx: no artifact for a browser/),
    });
    const digest = await crypto.subtle.digest(
      "SHA-256",
      Uint8Array.from(both.get("wasm/manifest.json") ?? []),
    );
    const integrity = `sha256-${Buffer.from(digest).toString("base64")}`;
    const listed = new Map([...both, ["manifest.json", listing("wasm")] as const]);
    expect([...(await find(listed, integrity)).keys()]).toEqual(["wasm"]);
  });

  test("is found behind a server that answers its page for files that it lacks", async () => {
    const page = new TextEncoder().encode("<!doctype html><title>app</title>");
    const { session } = await load(new Map([...both, ["manifest.json", page]]));
    expect(session.card().backend).toMatchObject({ name: "wasm", why: "no-gpu" });
    session.dispose();
    const html = new Map(
      [
        ["", ""],
        ["webgpu/", ""],
        ["wasm/", ""],
      ].map(([at]) => [`${at}manifest.json`, page]),
    );
    await expect(load(html)).rejects.toThrow(/manifest.json answers HTTP 200 with HTML/);
  });

  test("says that an address must be secure", async () => {
    vi.stubGlobal("crypto", {});
    await expect(load()).rejects.toThrow(/over https, or through localhost/);
  });

  test("says so where there is none at all", async () => {
    await expect(load(new Map())).rejects.toThrow(/toy\.example\/manifest\.json answers HTTP 404/);
  });
});
