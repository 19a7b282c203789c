import { describe, expect, test } from "vitest";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage } from "../support/engine-page.js";
import { expectedText } from "../support/toy-artifact.js";

describe.skipIf(!CHROMIUM)("a device that is lost, in Chromium", { timeout: 180_000 }, () => {
  const at = enginePage();

  test("reopens a lost device: the answer goes on, and so do later ones", async () => {
    const worker = new URL("dist/worker.js", at.server.url).href;
    const result = await at.page.evaluate(async (url) => {
      // Only the worker has the device, so code in the worker destroys it.
      const code = `import "${url}";
        let device;
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = async function (...given) {
          return (device = await request.apply(this, given));
        };
        addEventListener("message", ({ data }) => { if (data === "lose") device.destroy(); });`;
      let inside: Worker | null = null;
      const phases: string[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", {
        onProgress: ({ phase }) => phases.push(phase),
        worker: () => {
          const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          inside = new Worker(blob, { type: "module" });
          return inside;
        },
      });
      const lose = (): void => inside?.postMessage("lose");
      const request = { prompt: "abc", max_tokens: 60, temperature: 0 } as const;
      let streamed = "";
      for await (const { choices } of await engine.completions.create({ ...request, stream: true })) {
        if (streamed === "") lose();
        streamed += choices[0]?.text ?? "";
      }
      lose();
      const [one, other] = await Promise.all([
        engine.completions.create(request),
        engine.completions.create({ ...request, prompt: "x".repeat(80) }),
      ]);
      const stats = await engine.stats();
      lose();
      const profile = await engine.profile().catch((error: Error) => String(error));
      const last = await engine.completions.create(request);
      await engine.dispose();
      return {
        streamed,
        profile,
        after: [one, other, last].map(({ choices }) => choices[0]?.text),
        held: [stats.gpuBuffers > 10, (await engine.stats()).gpuBuffers],
        largestStep: stats.largestStep,
        reopened: stats.reopened,
        phases: phases.slice(phases.indexOf("ready") + 1),
      };
    }, worker);
    expect(result).toEqual({
      streamed: expectedText("abc", 60),
      profile: expect.stringMatching(/^DeviceError: The GPU device was lost/),
      after: [expectedText("abc", 60), expectedText("x".repeat(80), 60), expectedText("abc", 60)],
      held: [true, 0],
      largestStep: 64,
      reopened: 2,
      phases: expect.arrayContaining(["reopening", "weights", "kernels", "reopened"]),
    });
    const { phases } = result;
    expect(phases.filter((phase) => phase === "reopening" || phase === "reopened")).toEqual([
      ...["reopening", "reopened"],
      ...["reopening", "reopened"],
      ...["reopening", "reopened"],
    ]);
    const weights = (path: string): boolean => path.includes("weights/");
    expect(at.server.requests.filter(weights), "from the cache of shards").toHaveLength(3);
  });

  /** Two answers of a worker whose WebGPU is changed by `code`: each answer's text so far, and its error. */
  async function withPatch(code: string, prompt: string): Promise<{ text: string; error: string }[]> {
    const worker = new URL("dist/worker.js", at.server.url).href;
    return at.page.evaluate(
      async ([source, content]) => {
        const blob = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
        const engine = await nearfarPackage.createEngine("/toy/", {
          worker: () => new Worker(blob, { type: "module" }),
        });
        const request = { prompt: content, max_tokens: 40, temperature: 0, stream: true } as const;
        const answers = [
          { text: "", error: "" },
          { text: "", error: "" },
        ];
        for (const answer of answers) {
          try {
            for await (const { choices } of await engine.completions.create(request))
              answer.text += choices[0]?.text ?? "";
          } catch (error) {
            answer.error = String(error);
          }
        }
        await engine.dispose();
        return answers;
      },
      [`import "${worker}";\n${code}`, prompt] as const,
    );
  }

  test("believes no result of a step that the GPU refused", async () => {
    // One submit of an answer is dropped, as WebGPU does with commands for which it has no memory.
    const [refused, next] = await withPatch(
      `let device, left = 20;
      const request = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (...given) {
        return (device = await request.apply(this, given));
      };
      const submit = GPUQueue.prototype.submit;
      GPUQueue.prototype.submit = function (commands) {
        if (--left !== 0) return submit.call(this, commands);
        const error = new GPUOutOfMemoryError("no room for it");
        device.dispatchEvent(new GPUUncapturedErrorEvent("uncapturederror", { error }));
      };`,
      "Hello, world",
    );
    const expected = expectedText("Hello, world", 40);
    expect(refused?.error).toMatch(/^DeviceError: The GPU ran out of memory .*no room for it/);
    expect(refused?.text.length).toBeGreaterThan(1);
    expect(refused?.text).toBe(expected.slice(0, refused?.text.length));
    expect(next).toEqual({ text: expected, error: "" });
  });

  test("goes on with less room where a device that is opened again has no more, and says so", async () => {
    const worker = new URL("dist/worker.js", at.server.url).href;
    const result = await at.page.evaluate(async (url) => {
      // From the second device on, the cache has room for 1/8 of the pages.
      const code = `import "${url}";
        let device, opened = 0, whole = 0, isFull = false;
        const request = GPUAdapter.prototype.requestDevice;
        GPUAdapter.prototype.requestDevice = async function (...given) {
          opened += 1;
          return (device = await request.apply(this, given));
        };
        const create = GPUDevice.prototype.createBuffer;
        GPUDevice.prototype.createBuffer = function (given) {
          if (given.label === "kv.0.k") {
            if (opened === 1) whole = given.size;
            else isFull = given.size > whole / 8;
          }
          return create.call(this, given);
        };
        const pop = GPUDevice.prototype.popErrorScope;
        GPUDevice.prototype.popErrorScope = async function () {
          const error = await pop.call(this);
          if (!isFull) return error;
          isFull = false;
          return new GPUOutOfMemoryError("no room for it");
        };
        addEventListener("message", ({ data }) => { if (data === "lose") device.destroy(); });`;
      let inside: Worker | null = null;
      const told: { phase: string; contextLength?: number }[] = [];
      const warnings: string[] = [];
      const engine = await nearfarPackage.createEngine("/toy/", {
        onProgress: (progress) => told.push(progress),
        onWarning: (message) => warnings.push(message),
        worker: () => {
          const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
          inside = new Worker(blob, { type: "module" });
          return inside;
        },
      });
      const lose = (): void => (inside as Worker | null)?.postMessage("lose");
      const whole = engine.model.contextLength;
      const request = { max_tokens: 12, temperature: 0 } as const;
      lose();
      const [short, long] = await Promise.allSettled([
        engine.completions.create({ ...request, prompt: "abc" }),
        engine.completions.create({ ...request, prompt: "x".repeat(whole - 13) }),
      ]);
      const { contextLength } = await engine.stats();
      const reopened = told.find(({ phase }) => phase === "reopened")?.contextLength;
      const model = engine.model.contextLength;
      await engine.dispose();
      return {
        isShorter: contextLength < whole,
        same: [model, reopened].map((length) => length === contextLength),
        short: short.status === "fulfilled" ? short.value.choices[0]?.text : String(short.reason),
        long: long.status === "rejected" ? String(long.reason) : "no error",
        warnings,
      };
    }, worker);
    expect(result).toEqual({
      isShorter: true,
      same: [true, true],
      short: expectedText("abc", 12),
      long: expect.stringMatching(/^DeviceError: The device was reopened and has less room/),
      warnings: [expect.stringContaining("from now on the context is")],
    });
  });

  test("reopens a device that is lost while an answer waits for kernels", async () => {
    const answers = await withPatch(
      `let lost = false;
      const compile = GPUDevice.prototype.createComputePipelineAsync;
      GPUDevice.prototype.createComputePipelineAsync = async function (descriptor) {
        if (lost || descriptor.label !== "look_16") return compile.call(this, descriptor);
        lost = true;
        this.destroy();
        throw new GPUPipelineError("the instance is gone", { reason: "internal" });
      };`,
      "Hello, world",
    );
    const answer = { text: expectedText("Hello, world", 40), error: "" };
    expect(answers).toEqual([answer, answer]);
  });

  test("fails requests with a DeviceError when the GPU is lost for good", async () => {
    // A worker that loses its device while the answer is under way, and then finds no other.
    const patch = `
      const original = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (descriptor) {
        const device = await original.call(this, descriptor);
        GPU.prototype.requestAdapter = async () => null;
        addEventListener("message", ({ data }) => data.type === "generate" && device.destroy());
        return device;
      };`;
    at.server.intercept = (path, response) => {
      if (path !== "patch.js") return false;
      response.writeHead(200, { "content-type": "text/javascript" }).end(patch);
      return true;
    };
    const failed = at.page.evaluate(async () => {
      const imports = ["patch.js", "dist/worker.js"].map(
        (path) => `import "${new URL(path, location.href)}";`,
      );
      const blob = URL.createObjectURL(new Blob(imports, { type: "text/javascript" }));
      const worker = (): Worker => new Worker(blob, { type: "module" });
      const engine = await nearfarPackage.createEngine("/toy/", { worker });
      const failures: string[] = [];
      while (failures.length < 2) {
        const request = { prompt: "x", temperature: 0, max_tokens: 50 };
        await engine.completions.create(request).catch((error: Error) => failures.push(String(error)));
      }
      return { failures, lost: (await engine.lost).code };
    });
    const lost = expect.stringMatching(/DeviceError: The browser has WebGPU, but offers no GPU/);
    expect(await failed).toEqual({ failures: [lost, lost], lost: "no-adapter" });
  });
});
