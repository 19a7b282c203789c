import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import type { Browser, BrowserContext, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import type * as store from "../../src/worker/store/shard-cache.js";
import { CHROMIUM, openChromium } from "../support/chromium.js";
import { builtPackage, distFile, type StaticServer, serve } from "../support/serve.js";
import { toyArtifact } from "../support/toy-artifact.js";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

declare global {
  var nearfarPackage: typeof nearfar;
  var shardStore: typeof store;
}

/** The name of a made-up shard. */
const SHARD = "5".repeat(64);

describe.skipIf(!CHROMIUM)("the store of shards, with several tabs", { timeout: 60_000 }, () => {
  let browser: Browser;
  let code: string;
  let server: StaticServer;
  let context: BrowserContext;
  let first: Page;
  let second: Page;
  const artifacts = new Map([
    ["toy", toyArtifact()],
    ["other", toyArtifact({ build: 7 })],
  ]);

  beforeAll(async () => {
    await builtPackage();
    const entry = { contents: `export * from "./src/worker/store/shard-cache.ts"`, resolveDir: ROOT };
    const made = await build({
      stdin: entry,
      bundle: true,
      format: "iife",
      globalName: "shardStore",
      write: false,
    });
    code = made.outputFiles[0]?.text ?? "";
    browser = await openChromium();
  }, 60_000);
  afterAll(() => browser?.close());

  beforeEach(async () => {
    server = await serve(async (path) => {
      const [name = "", ...rest] = path.split("/");
      return artifacts.get(name)?.files.get(rest.join("/")) ?? (await distFile(path));
    });
    context = await browser.newContext();
    const open = async (): Promise<Page> => {
      const page = await context.newPage();
      await page.goto(server.url.href);
      await page.evaluate(code.replace("var shardStore", "globalThis.shardStore"));
      const content = `import * as nearfar from "/dist/index.js"; globalThis.nearfarPackage = nearfar;`;
      await page.addScriptTag({ type: "module", content });
      await page.waitForFunction(() => "nearfarPackage" in globalThis);
      return page;
    };
    [first, second] = [await open(), await open()];
  });
  afterEach(async () => {
    await context.close();
    server.close();
  });

  /** Loads in a tab; what it warned of. */
  const load = (page: Page, name: string): Promise<string[]> =>
    page.evaluate(async (path) => {
      const warnings: string[] = [];
      const engine = await nearfarPackage.createEngine(path, {
        onWarning: (message) => warnings.push(message),
      });
      await engine.dispose();
      return warnings;
    }, `/${name}/`);

  const namesIn = (directory: string): Promise<string[]> =>
    first.evaluate(async (name) => {
      const names: string[] = [];
      const root = await navigator.storage.getDirectory();
      for await (const key of (await root.getDirectoryHandle(name)).keys()) names.push(key);
      return names.sort();
    }, directory);

  const shardsOf = (...names: string[]): string[] => {
    const texts = names.map((name) =>
      new TextDecoder().decode(artifacts.get(name)?.files.get("manifest.json")),
    );
    const lists = texts.map((text) => JSON.parse(text) as { weights: { shards: { sha256: string }[] } });
    return [...new Set(lists.flatMap(({ weights }) => weights.shards.map(({ sha256 }) => sha256)))].sort();
  };

  test("a shard that one tab writes is whole or absent in another", async () => {
    const writing = first.evaluate(async (name) => {
      const cache = await shardStore.openOpfsCache(new URL("/a/", location.href), [name]);
      for (let round = 0; round < 25; round++) {
        await cache?.delete(name);
        await cache?.put(name, new Uint8Array(2 ** 21));
      }
      return cache !== null;
    }, SHARD);
    const seen = await second.evaluate(async (name) => {
      const cache = await shardStore.openOpfsCache(new URL("/a/", location.href), [name]);
      const lengths = new Set<number>();
      for (let round = 0; round < 300; round++) {
        lengths.add((await cache?.get(name))?.length ?? -1);
        // As a tab does that found none: both write at once.
        if (round % 20 === 0) await cache?.put(name, new Uint8Array(2 ** 21));
      }
      return [...lengths];
    }, SHARD);
    expect(await writing).toBe(true);
    expect(seen.filter((length) => length !== -1)).toEqual([2 ** 21]);
    expect(await namesIn("nearfar-shards")).toEqual([SHARD]);
  });

  test("two cold tabs load the same artifact without a complaint", async () => {
    expect(await Promise.all([load(first, "toy"), load(second, "toy")])).toEqual([[], []]);
    const asked = (): number => server.requests.filter((path) => path.includes("weights/")).length;
    const cold = asked();
    expect(await Promise.all([load(first, "toy"), load(second, "toy")])).toEqual([[], []]);
    expect(asked()).toBe(cold);
  });

  test("the shards of an artifact's last build go, those of others stay", async () => {
    await load(first, "toy");
    await load(second, "other");
    expect(await namesIn("nearfar-shards")).toEqual(shardsOf("toy", "other"));
    artifacts.set("toy", toyArtifact({ build: 1 }));
    await load(first, "toy");
    expect(await namesIn("nearfar-shards")).toEqual(shardsOf("toy", "other"));
  });

  test("what is spoiled or left half written is swept, and spoils nothing", async () => {
    await load(first, "toy");
    await first.evaluate(async () => {
      const root = await navigator.storage.getDirectory();
      const spoil = async (directory: string, name: string, text: string): Promise<void> => {
        const handle = await (await root.getDirectoryHandle(directory)).getFileHandle(name, { create: true });
        const stream = await handle.createWritable();
        await stream.write(text);
        await stream.close();
      };
      await spoil("nearfar-shards", "abc.123.part", "half");
      for (const [i, text] of [
        "",
        "null",
        "[]",
        "{",
        '{"shards":5,"used":1}',
        '{"shards":[1],"used":1}',
      ].entries())
        await spoil("nearfar-lists", `spoiled-${i}`, text);
    });
    expect(await load(second, "toy")).toEqual([]);
    expect(await namesIn("nearfar-shards")).toEqual(shardsOf("toy"));
    expect(await namesIn("nearfar-lists")).toHaveLength(1);
  });

  test("the artifact unused longest makes room when the storage is full", async () => {
    await load(first, "other");
    await load(first, "toy");
    await first.evaluate(async (name) => {
      const { write } = FileSystemWritableFileStream.prototype;
      let full = true;
      FileSystemWritableFileStream.prototype.write = function (this: FileSystemWritableFileStream, data) {
        const isShard = data instanceof Uint8Array && data.length === 4321;
        if (!isShard || !full) return write.call(this, data);
        full = false;
        return Promise.reject(new DOMException("full", "QuotaExceededError"));
      };
      const cache = await shardStore.openOpfsCache(new URL("/a/", location.href), [name]);
      await cache?.put(name, new Uint8Array(4321));
    }, SHARD);
    expect(await namesIn("nearfar-shards")).toEqual([...shardsOf("toy"), SHARD].sort());
  });
});
