import { describe, expect, test } from "vitest";
import { MOST_FILES } from "../../scripts/size.mjs";
import type { LoadProgress } from "../../src/page/index.js";
import { distFile } from "../support/built.js";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage, importPackage } from "../support/engine-page.js";
import { serve } from "../support/serve.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";
import { toyWasm } from "../support/toy-wasm.js";

declare global {
  var abortLoad: () => void;
}

describe.skipIf(!CHROMIUM)("loading in Chromium", { timeout: 180_000 }, () => {
  const at = enginePage();

  test("keeps verified shards; a corrupt one is downloaded again", async () => {
    const load = (): Promise<string[]> =>
      at.page.evaluate(async () => {
        const warnings: string[] = [];
        const engine = await nearfarPackage.createEngine("/toy/", {
          onWarning: (message) => warnings.push(message),
        });
        const { choices } = await engine.completions.create({ prompt: "q", max_tokens: 9, temperature: 0 });
        await engine.dispose();
        return [choices[0]?.text ?? "", ...warnings];
      });
    const shards = (): number => at.server.requests.filter((path) => path.includes("weights/")).length;
    const text = expectedText("q", 9);
    expect(await load()).toEqual([text]);
    expect(shards()).toBe(3);
    expect(await load()).toEqual([text]);
    expect(shards()).toBe(3);
    await at.page.evaluate(async () => {
      const root = await navigator.storage.getDirectory();
      const directory = await root.getDirectoryHandle("nearfar-files");
      for await (const handle of directory.values()) {
        const writable = await (handle as FileSystemFileHandle).createWritable({ keepExistingData: true });
        await writable.write({ type: "write", position: 1, data: new Uint8Array([99]) });
        await writable.close();
      }
    });
    const corrupt = expect.stringMatching(/cached copy of weights.* is corrupt/);
    expect(await load()).toEqual([text, corrupt, corrupt, corrupt]);
    expect(shards()).toBe(6);
  });

  test("a cold load asks for six files of the package, and of an artifact for three and its shards", async () => {
    const shardBytes = 256;
    const toys = {
      f32: toyArtifact({ packed: true, shardBytes }),
      toy: await toyWasm(undefined, { packed: true, shardBytes }),
    };
    const page = await at.page.context().newPage();
    for (const [program, artifact] of Object.entries(toys)) {
      at.artifact = artifact;
      const shards = [...artifact.files.keys()].filter((path) => path.startsWith("weights/"));
      expect(shards.length).toBeGreaterThan(3);
      await at.page.evaluate(() => nearfarPackage.deleteModel("/toy/"));
      await page.goto(at.server.url.href);
      at.server.requests.length = 0;
      await importPackage(page, new URL("dist/index.js", at.server.url));
      const text = await page.evaluate(async () => {
        const engine = await nearfarPackage.createEngine("/toy/");
        const { choices } = await engine.completions.create({ prompt: "q", max_tokens: 9, temperature: 0 });
        await engine.dispose();
        return choices[0]?.text;
      });
      expect(text).toBe(expectedText("q", 9));
      const { requests } = at.server;
      const asked = requests.filter((path) => path.startsWith("toy/")).sort();
      const packs = [`program-${program}`, "tokenizer"].map((name) => `packs/${name}.bin`);
      expect(asked).toEqual(["manifest.json", ...packs, ...shards].map((path) => `toy/${path}`));
      expect(requests.length - asked.length).toBeLessThanOrEqual(MOST_FILES);
    }
  });

  test("progress goes through download, check and upload, and all are done at ready", async () => {
    const steps = await at.page.evaluate(async () => {
      const told: LoadProgress[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", { onProgress: (step) => told.push(step) });
      await engine.dispose();
      return told;
    });
    // The measurements from which isSupported predicts the next first load; there are too few weights for one.
    const measures = await at.page.evaluate(() => Object.entries(localStorage));
    expect(measures).toEqual([
      [expect.stringMatching(/^nearfar\.compile ./), expect.stringMatching(/^[\d.e-]+$/)],
    ]);
    expect(steps.at(-1)).toEqual({ phase: "ready", fraction: 1 });
    const weights = steps.flatMap((step) => (step.phase === "weights" ? [step] : []));
    const { verified = 0, uploaded = 0, loaded, total } = weights.at(-1) ?? { loaded: 0, total: -1 };
    expect([loaded, verified, uploaded]).toEqual([total, total, total]);
    for (const step of weights) {
      expect(step.uploaded).toBeLessThanOrEqual(step.verified ?? -1);
      expect(step.verified).toBeLessThanOrEqual(step.loaded);
    }
    const kernels = steps.flatMap((step) => (step.phase === "kernels" ? [step] : []));
    expect(kernels.at(-1)).toMatchObject({ compiled: kernels.at(-1)?.total });
  });

  test("a model that is ready on a GPU has no kernels to compile for an answer", async () => {
    // Chromium's software GPU, which pretends to be unknown.
    const unknown = '{ vendor: "", architecture: "", device: "", description: "unknown" }';
    const before = `Object.defineProperty(GPUAdapter.prototype, "info", { get: () => (${unknown}) });\n`;
    await at.page.route("**/worker.js", async (route) => {
      const response = await route.fetch();
      await route.fulfill({ response, body: before + (await response.text()) });
    });
    const [atLoad, later, prompts] = await at.page.evaluate(async () => {
      let told: LoadProgress[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", { onProgress: (step) => told.push(step) });
      const kernels = (): LoadProgress[] => told.filter(({ phase }) => phase === "kernels");
      const first = kernels();
      told = [];
      for (const prompt of ["q", "q".repeat(20), "q".repeat(90)])
        for (const temperature of [0, 1])
          await engine.completions.create({ prompt, max_tokens: 3, temperature, logprobs: 2 });
      await engine.dispose();
      return [first, kernels(), told.filter(({ phase }) => phase === "prompt")] as const;
    });
    await at.page.unroute("**/worker.js");
    const kernels = [...at.artifact.files.keys()].filter((file) => file.startsWith("kernels/")).length;
    expect(atLoad.at(-1)).toMatchObject({ compiled: kernels, total: kernels });
    expect(later).toEqual([]);
    // The longest prompt takes two steps; the first time it is not in the cache.
    const [{ read, total } = { read: 0, total: 0 }, last] = prompts as { read: number; total: number }[];
    expect([read > 0, read < total]).toEqual([true, true]);
    expect(last).toMatchObject({ read: total, total });
  });

  test("a pack that is not the manifest's is refused, and so is one that holds another file", async () => {
    const attempt = (): Promise<string> =>
      at.page.evaluate(async () => {
        try {
          await (await nearfarPackage.createEngine("/toy/")).dispose();
          return "";
        } catch (error) {
          return String(error);
        }
      });
    at.artifact = toyArtifact({ packed: true });
    const pack = at.artifact.files.get("packs/program-f32.bin") ?? new Uint8Array();
    at.artifact.files.set("packs/program-f32.bin", pack.slice(0, -1));
    expect(await attempt()).toMatch(/ArtifactError.*program-f32\.bin is corrupt/);
    at.artifact = toyArtifact({ packed: true, stale: "plans/f32/step.1.json" });
    expect(await attempt()).toMatch(
      /ArtifactError.*program-f32\.bin holds another plans\/f32\/step\.1\.json/,
    );
  });

  test("says what is wrong with an artifact, a device, a request", async () => {
    const attempt = (): Promise<{ name: string; message: string }> =>
      at.page.evaluate(async () => {
        try {
          const engine = await nearfarPackage.createEngine("/toy/");
          await engine.dispose();
          return { name: "none", message: "" };
        } catch (error) {
          const { ArtifactError, DeviceError } = nearfarPackage;
          const known = error instanceof ArtifactError || error instanceof DeviceError;
          return { name: known ? error.name : "unknown", message: String(error) };
        }
      });
    at.server.intercept = (path, response) =>
      path.endsWith("00001.bin") && Boolean(response.end(new Uint8Array(512)));
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/00001\.bin.*corrupt/),
    });
    at.server.intercept = () => false;
    // The second shard may have come at the same time as the first.
    await at.page.evaluate(() => nearfarPackage.deleteModel("/toy/"));
    at.artifact.files.delete("weights/00002.bin");
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/00002\.bin.*HTTP 404/),
    });
    at.artifact = toyArtifact();
    // A CDN may still have the plan of an earlier build.
    const stale = new TextEncoder().encode(
      `${new TextDecoder().decode(at.artifact.files.get("plans/f32/step.1.json"))} `,
    );
    at.artifact.files.set("plans/f32/step.1.json", stale);
    // Good copies are kept from the earlier loads.
    await at.page.evaluate(async () => {
      const root = await navigator.storage.getDirectory();
      await root.removeEntry("nearfar-files", { recursive: true });
    });
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/step\.1\.json is corrupt/),
    });
    at.artifact = toyArtifact();
    const edited = new TextDecoder()
      .decode(at.artifact.files.get("manifest.json"))
      .replace('"scale": 1', '"scale": 2');
    at.artifact.files.set("manifest.json", new TextEncoder().encode(edited));
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/not as the build wrote/),
    });
    at.artifact = toyArtifact({ features: ["shader-f16"] });
    expect(await attempt()).toEqual({
      name: "DeviceError",
      message: expect.stringMatching(/f32: shader-f16/),
    });
    at.artifact = toyArtifact();
    at.artifact.files.delete("manifest.json");
    expect(await attempt()).toEqual({
      name: "ArtifactError",
      message: expect.stringMatching(/manifest\.json.*404/),
    });

    at.artifact = toyArtifact();
    const refused = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const params: (string | null)[] = [];
      const options = [
        { temperature: -1 },
        { top_p: 0 },
        { n: 0 },
        { prompt: "x".repeat(256) },
        { logprobs: 21 },
        {},
      ];
      for (const option of options) {
        try {
          await engine.completions.create({ prompt: "x", temperature: 0, max_tokens: 1, ...option });
          params.push("none");
        } catch (error) {
          params.push(error instanceof nearfarPackage.RequestError ? error.param : String(error));
        }
      }
      await engine.dispose();
      return params;
    });
    expect(refused).toEqual(["temperature", "top_p", "n", "messages", "logprobs", "none"]);
  });

  test("works from another origin, as from a CDN", async () => {
    const cdn = await serve(distFile);
    try {
      await importPackage(at.page, new URL("dist/index.js", cdn.url));
      const text = await at.page.evaluate(async () => {
        const engine = await nearfarPackage.createEngine("/toy/");
        const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
        await engine.dispose();
        return choices[0]?.text;
      });
      expect(text).toBe(expectedText("z", 5));
    } finally {
      cdn.close();
    }
  });

  test("aborts while loading", async () => {
    let ask = (): void => undefined;
    const asked = new Promise<void>((resolve) => {
      ask = resolve;
    });
    at.server.intercept = (path) => {
      const isHeld = path.endsWith("00001.bin");
      if (isHeld) ask();
      return isHeld;
    };
    const loading = at.page.evaluate(async () => {
      // A worker that does not end by itself is ended after two seconds: here after two minutes.
      const { setTimeout: after } = globalThis;
      globalThis.setTimeout = ((work: () => void, ms: number) =>
        after(work, ms === 2000 ? 120_000 : ms)) as typeof setTimeout;
      const controller = new AbortController();
      let aborted = 0;
      globalThis.abortLoad = () => {
        aborted = performance.now();
        controller.abort();
      };
      try {
        await nearfarPackage.createEngine("/toy/", { signal: controller.signal });
        return { name: "none", took: 0 };
      } catch (error) {
        return { name: (error as Error).name, took: performance.now() - aborted };
      }
    });
    await asked;
    await at.page.evaluate(() => globalThis.abortLoad());
    const result = await loading;
    expect(result.name).toBe("AbortError");
    expect(result.took).toBeLessThan(60_000);
  });

  test("a strict policy needs the worker's file alone", async () => {
    const policy = "default-src 'none'; script-src 'self'; worker-src 'self'; connect-src 'self'";
    at.server.intercept = (path, response) => {
      if (path !== "strict" && path !== "strict.js") return false;
      const [type, body] =
        path === "strict"
          ? ["text/html", `<!doctype html><script type="module" src="strict.js"></script>`]
          : [
              "text/javascript",
              `import * as nearfar from "/dist/index.js"; globalThis.nearfarPackage = nearfar;`,
            ];
      response.writeHead(200, { "content-type": type, "content-security-policy": policy }).end(body);
      return true;
    };
    await at.page.goto(new URL("strict", at.server.url).href);
    await at.page.waitForFunction(() => "nearfarPackage" in globalThis);
    const text = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
      await engine.dispose();
      return choices[0]?.text;
    });
    expect(text).toBe(expectedText("z", 5));
    expect(at.server.requests.filter((path) => path.includes("worker-source"))).toEqual([]);
  });

  test("takes WebGPU of a folder with both where a policy forbids WebAssembly", async () => {
    const parts = { webgpu: toyArtifact(), wasm: await toyWasm() };
    at.artifact.files.clear();
    for (const [name, { files }] of Object.entries(parts))
      for (const [path, bytes] of files) at.artifact.files.set(`${name}/${path}`, bytes);
    at.server.intercept = (_, response) => {
      response.setHeader("content-security-policy", "script-src 'self' 'unsafe-inline'");
      return false;
    };
    const { text, backend } = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
      await engine.dispose();
      return { text: choices[0]?.text, backend: engine.model.backend };
    });
    expect(text).toBe(expectedText("z", 5));
    const reason = expect.stringContaining("'wasm-unsafe-eval'");
    expect(backend).toEqual({ name: "webgpu", why: "failed", reason });
  });

  test("needs no way to join signals, which the first browsers with WebGPU lack", async () => {
    const worker = new URL("dist/worker.js", at.server.url).href;
    const text = await at.page.evaluate(async (url) => {
      const code = `delete AbortSignal.any; import "${url}";`;
      const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
      const engine = await nearfarPackage.createEngine("/toy/", {
        worker: () => new Worker(blob, { type: "module" }),
      });
      const { choices } = await engine.completions.create({ prompt: "z", max_tokens: 5, temperature: 0 });
      await engine.dispose();
      return choices[0]?.text;
    }, worker);
    expect(text).toBe(expectedText("z", 5));
  });
});
