import { readFile } from "node:fs/promises";
import { basename, join, normalize } from "node:path";
import { build, type Plugin } from "esbuild";
import { chromium } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { builtPackage, distFile } from "../support/built.js";
import { CHROMIUM } from "../support/chromium.js";
import { expectedTokens } from "../support/fake-backend.js";
import { FIREFOX, openFirefox } from "../support/firefox.js";
import { type StaticServer, serve } from "../support/serve.js";
import { TOY_VOCAB, toyArtifact } from "../support/toy-artifact.js";
import { REFUSED, TRAPS, toyWasm } from "../support/toy-wasm.js";

/**
 * WebAssembly in real browsers, on isolated and other pages: with the toy, and with a real artifact if
 * NEARFAR_WASM_ARTIFACT names its folder; that should answer an empty prompt with NEARFAR_WASM_TEXT.
 */
const REAL = process.env.NEARFAR_WASM_ARTIFACT ?? null;
const REAL_TEXT = process.env.NEARFAR_WASM_TEXT ?? null;

declare global {
  var engine: nearfar.Engine;
}

/** The methods of a page that both browsers' drivers have. */
interface Tab {
  goto(url: string): Promise<unknown>;
  addScriptTag(tag: { type: string; content: string }): Promise<unknown>;
  evaluate<T, A>(code: (argument: A) => Promise<T>, argument: A): Promise<T>;
  close(): Promise<void>;
}

interface Opened {
  tab(): Promise<Tab>;
  close(): Promise<void>;
}

const BROWSERS: readonly [name: string, path: string | null, open: () => Promise<Opened>][] = [
  [
    "Chromium",
    CHROMIUM,
    async () => {
      const browser = await chromium.launch({ executablePath: CHROMIUM ?? "", args: ["--no-sandbox"] });
      return { tab: async () => (await browser.newPage()) as unknown as Tab, close: () => browser.close() };
    },
  ],
  [
    "Firefox",
    FIREFOX,
    async () => {
      const browser = await openFirefox();
      return { tab: async () => (await browser.newPage()) as unknown as Tab, close: () => browser.close() };
    },
  ],
];

const ISOLATED = {
  "cross-origin-opener-policy": "same-origin",
  "cross-origin-embedder-policy": "require-corp",
  "cross-origin-resource-policy": "same-origin",
};

const toy = await toyWasm();
const gpuToy = toyArtifact();

const SERVICE_WORKER = `
  import { createEngine } from "./dist/here.js";
  const answer = async (prompt) => {
    const engine = await createEngine("/toy/");
    const { choices } = await engine.completions.create({ prompt, max_tokens: 20, temperature: 0 });
    await engine.dispose();
    return choices[0].text;
  };
  addEventListener("message", (event) => {
    const { data, ports } = event;
    event.waitUntil(answer(data).catch(String).then((text) => ports[0].postMessage(text)));
  });`;

/** The service worker, bundled for browsers in which service workers cannot be modules. */
async function classicServiceWorker(): Promise<Uint8Array | null> {
  const here: Plugin = {
    name: "here",
    setup: ({ onResolve, onLoad }) => {
      onResolve({ filter: /\.js$/ }, ({ path }) => ({ path: basename(path), namespace: "dist" }));
      onLoad({ filter: /./, namespace: "dist" }, async ({ path }) => ({
        contents: (await distFile(`dist/${path}`)) ?? "",
      }));
    },
  };
  const { outputFiles } = await build({
    stdin: { contents: SERVICE_WORKER },
    bundle: true,
    format: "iife",
    platform: "browser",
    plugins: [here],
    logLevel: "error",
    write: false,
  });
  return outputFiles[0]?.contents ?? null;
}

async function fileAt(path: string): Promise<Uint8Array | null> {
  const [folder, ...rest] = path.split("/");
  const within = rest.join("/");
  if (folder === "toy") return toy.files.get(within) ?? null;
  if (folder === "sw.js") return new TextEncoder().encode(SERVICE_WORKER);
  if (folder === "classic.js") return classicServiceWorker();
  if (folder === "both") {
    const [target, ...file] = rest;
    const artifact = target === "webgpu" ? gpuToy : target === "wasm" ? toy : null;
    return artifact?.files.get(file.join("/")) ?? null;
  }
  if (folder !== "real" || !REAL) return distFile(path);
  const found = normalize(join(REAL, within));
  return found.startsWith(REAL) ? readFile(found).catch(() => null) : null;
}

/** The result of a test's step; an error with its name if it does not finish. */
function within<T>(step: string, work: Promise<T>): Promise<T> {
  let timer: ReturnType<typeof setTimeout>;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not done: ${step}`)), 60_000);
  });
  return Promise.race([work, late]).finally(() => clearTimeout(timer));
}

/** The text that the toy model gives after `prompt`. */
function expectedText(prompt: string, count: number): string {
  const ids = prompt === "" ? [0] : [...prompt].map((character) => character.charCodeAt(0) - 31);
  return expectedTokens(ids, count, TOY_VOCAB)
    .map((id) => (id === 0 || id === 96 ? "" : String.fromCharCode(id + 31)))
    .join("");
}

/** A prompt whose answer of `count` tokens has none at which the toy's kernels fail. */
function harmless(count: number): string {
  const disliked = [TRAPS, REFUSED].map((token) => String.fromCharCode(token + 31));
  for (let i = 0; ; i++) {
    const prompt = `a prompt ${i}`;
    if (!disliked.some((character) => expectedText(prompt, count).includes(character))) return prompt;
  }
}

describe.each(BROWSERS)("WebAssembly in %s", { timeout: 180_000 }, (name, path, open) => {
  let browser: Opened;
  let server: StaticServer;
  let headers: Record<string, string> = {};

  beforeAll(async () => {
    if (path === null) return;
    await builtPackage();
    server = await serve(fileAt);
    server.intercept = (_, response) => {
      for (const [name, value] of Object.entries(headers)) response.setHeader(name, value);
      return false;
    };
    browser = await open();
  }, 180_000);
  afterAll(async () => {
    server?.close();
    await browser?.close();
  });

  /** A page with the package, as an app imports it. */
  async function page(sent: Record<string, string>): Promise<Tab> {
    headers = sent;
    const tab = await browser.tab();
    await tab.goto(server.url.href);
    const content = `import * as nearfar from "${server.url}dist/index.js"; globalThis.nearfarPackage = nearfar;`;
    await tab.addScriptTag({ type: "module", content });
    await tab.evaluate(async () => {
      while (!("nearfarPackage" in globalThis)) await new Promise((resolve) => setTimeout(resolve, 10));
    }, null);
    return tab;
  }

  interface Said {
    readonly texts: readonly string[];
    readonly isolated: boolean;
    readonly stats: nearfar.EngineStats;
    readonly warnings: readonly string[];
  }

  const say = (
    tab: Tab,
    url: string,
    options: nearfar.EngineOptions,
    prompts: readonly string[],
    count: number,
  ) =>
    tab.evaluate(
      async (given): Promise<Said> => {
        const { createEngine } = globalThis.nearfarPackage;
        const warnings: string[] = [];
        const onWarning = (message: string): void => void warnings.push(message);
        const engine = await createEngine(given.url, { ...given.options, onWarning });
        const ask = async (prompt: string): Promise<string> => {
          const request = { prompt, max_tokens: given.count, temperature: 0 };
          return (await engine.completions.create(request)).choices[0]?.text ?? "";
        };
        const texts: string[] = [];
        for (const prompt of given.prompts) texts.push(await ask(prompt).catch((error) => String(error)));
        const stats = await engine.stats();
        await engine.dispose();
        return { texts, isolated: globalThis.crossOriginIsolated, stats, warnings };
      },
      { url, options, prompts, count },
    );

  /**
   * Where Firefox is driven by WebDriver on a busy machine, `new Worker` in a worker (a thread of the engine, what
   * follows grammars) never comes back on one page of some twenty: that thread stands still within the browser.
   * So what stood still, and nothing else, is done again there, from nothing.
   */
  const again = async <T>(work: (run: number) => Promise<T>, stood: RegExp): Promise<T> => {
    for (let run = 1; ; run++) {
      try {
        return await work(run);
      } catch (error) {
        if (name !== "Firefox" || run === 3 || !stood.test(String(error))) throw error;
      }
    }
  };

  /** An answer on an isolated page. The engine reports a worker that hangs. */
  const sayIsolated = (
    url: string,
    options: nearfar.EngineOptions,
    prompts: readonly string[],
    count: number,
  ): Promise<Said> => {
    const patience = name === "Firefox" ? { patience: 10 } : {};
    return again(
      async () => say(await page(ISOLATED), url, { ...options, ...patience }, prompts, count),
      /it hangs/,
    );
  };

  test.skipIf(!path)("an isolated page has threads, another has one", async () => {
    const prompt = harmless(40);
    const alone = await say(await page({}), "/toy/", { threads: 2 }, [prompt], 40);
    expect(alone).toMatchObject({
      texts: [expectedText(prompt, 40)],
      isolated: false,
      stats: { threads: 1, program: "toy", backend: { name: "wasm", why: "only" } },
      warnings: [expect.stringMatching(/^One thread computes, not 2: .*Cross-Origin-Opener-Policy/)],
    });
    const together = await sayIsolated("/toy/", { threads: 3 }, [prompt], 40);
    expect(together).toMatchObject({
      texts: [expectedText(prompt, 40)],
      isolated: true,
      stats: { threads: 3, program: "toy-threads" },
      warnings: [],
    });
  });

  test.skipIf(!path)("a trap ends a request by name, and the next one is answered", async () => {
    const prompt = harmless(20);
    const bad = `${prompt}${String.fromCharCode(TRAPS + 31)}`;
    const { texts } = await sayIsolated("/toy/", { threads: 2 }, [prompt, bad, prompt], 20);
    const expected = expectedText(prompt, 20);
    expect(texts).toEqual([
      expected,
      expect.stringMatching(/DeviceError: A kernel of step\.\d+ trapped \(RuntimeError/),
      expected,
    ]);
  });

  test.skipIf(!path)("takes WebAssembly of a folder with both where there is no GPU", async () => {
    const prompt = harmless(20);
    const { texts, stats } = await say(await page({}), "/both/", {}, [prompt], 20);
    expect(texts).toEqual([expectedText(prompt, 20)]);
    expect(stats.backend).toMatchObject({ name: "wasm", why: expect.stringMatching(/^(no-gpu|software)$/) });
  });

  test.skipIf(!path)("needs wasm-unsafe-eval of a strict policy, and says so where it lacks", async () => {
    const policy = (more: string): Record<string, string> => ({
      "content-security-policy": `default-src 'none'; script-src 'self' 'unsafe-inline'${more}; worker-src 'self'; connect-src 'self'`,
    });
    const prompt = harmless(10);
    const allowed = await say(await page(policy(" 'wasm-unsafe-eval'")), "/toy/", {}, [prompt], 10);
    expect(allowed.texts).toEqual([expectedText(prompt, 10)]);
    const refused = say(await page(policy("")), "/toy/", {}, [prompt], 10);
    await expect(refused).rejects.toThrow(/'wasm-unsafe-eval' in script-src/);
  });

  const SCRIPTS = [
    ["module", "/sw.js"],
    ["classic", "/classic.js"],
  ] as const;
  test.skipIf(!path).each(SCRIPTS)("answers in a service worker (%s)", async (type, script) => {
    const prompt = harmless(20);
    const tab = await page({});
    const text = await tab.evaluate(
      async ({ prompt, type, script }) => {
        const registration = await navigator.serviceWorker.register(script, { type });
        const worker = registration.installing ?? registration.waiting ?? registration.active;
        const { port1, port2 } = new MessageChannel();
        const answer = new Promise<string>((resolve) => {
          port1.onmessage = ({ data }) => resolve(data as string);
        });
        worker?.postMessage(prompt, [port2]);
        const text = await answer;
        await registration.unregister();
        return text;
      },
      { prompt, type, script },
    );
    expect(text).toBe(expectedText(prompt, 20));
  });

  // tabs.test.ts and share.test.ts test more of this in Chromium.
  test.skipIf(!path || name === "Chromium").each([
    ["in a SharedWorker", false],
    ["in one of the pages", true],
  ])("sharedEngine() has one engine for several pages, %s", { timeout: 240_000 }, async (place, alone) => {
    const prompt = harmless(20);
    const text = expectedText(prompt, 20);

    /** One run with an engine of its own. If a step does not finish, the error names it. */
    const sharing = async (name: string): Promise<void> => {
      const tabs: Tab[] = [];
      const open = async (): Promise<Tab> => {
        const tab = await page({});
        tabs.push(tab);
        await tab.evaluate(
          async ({ alone, name }) => {
            if (alone) Reflect.deleteProperty(globalThis, "SharedWorker");
            const worker = () => nearfarPackage.sharedEngine({ name });
            globalThis.engine = await nearfarPackage.createEngine("/toy/", { worker });
          },
          { alone, name },
        );
        return tab;
      };
      const ask = (tab: Tab, more: object = {}): Promise<string | undefined> =>
        tab.evaluate(async (request) => (await engine.completions.create(request)).choices[0]?.text, {
          ...{ prompt, max_tokens: 20, temperature: 0 },
          ...more,
        });
      const launches = (tab: Tab): Promise<number> =>
        tab.evaluate(async () => (await engine.stats()).launches, null);

      try {
        const first = await within("first page", open());
        const second = await within("second page", open());
        expect(await within("answers", Promise.all([ask(first), ask(second)]))).toEqual([text, text]);
        expect(await within("stats", launches(first))).toBe(await within("stats", launches(second)));
        const format = { type: "regex", regex: "[0-9]{3}" };
        expect(await within("a format", ask(second, { response_format: format }))).toMatch(/^\d{3}$/);
        await within("closing", first.close());
        expect(await within("an answer after that", ask(second))).toBe(text);
      } finally {
        // Closing a page that hangs does not return either.
        for (const tab of tabs) void tab.close().catch(() => undefined);
      }
    };

    await again((run) => sharing(`${place} ${run}`), /not done: /);
  });

  test.skipIf(!path || !REAL || REAL_TEXT === null)(
    "a real artifact says what it says elsewhere",
    async () => {
      const alone = await say(await page({}), "/real/", { threads: 1 }, [""], 199);
      const together = await sayIsolated("/real/", { threads: 2 }, [""], 199);
      expect([alone.texts, together.texts]).toEqual([[REAL_TEXT], [REAL_TEXT]]);
      expect([alone.stats.threads, together.stats.threads]).toEqual([1, 2]);
    },
  );
});
