import { createHash } from "node:crypto";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import type { Browser, BrowserContext, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test, vi } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import type * as store from "../../src/storage/file-cache.js";
import { builtPackage, distFile } from "../support/built.js";
import { CHROMIUM, openChromium } from "../support/chromium.js";
import { type StaticServer, serve } from "../support/serve.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

declare global {
  /** The engine that stays open. */
  var running: nearfar.Engine;
  var nearfarPackage: typeof nearfar;
  var shardStore: typeof store;
}

/** Bytes of the files, each content counted once. */
function sizeOf(files: readonly Uint8Array[]): number {
  const byHash = new Map(files.map((bytes) => [createHash("sha256").update(bytes).digest("hex"), bytes]));
  return [...byHash.values()].reduce((sum, { length }) => sum + length, 0);
}

/** The name of a made-up shard. */
const SHARD = "5".repeat(64);

describe.skipIf(!CHROMIUM)("the store of shards, with several tabs", { timeout: 180_000 }, () => {
  let browser: Browser;
  let code: string;
  let server: StaticServer;
  let context: BrowserContext;
  let first: Page;
  let second: Page;
  const artifacts = new Map([
    ["toy", toyArtifact()],
    ["other", toyArtifact({ build: 7 })],
    ["packed", toyArtifact({ build: 9, packed: true })],
  ]);

  beforeAll(async () => {
    await builtPackage();
    const entry = { contents: `export * from "./src/storage/file-cache.ts"`, resolveDir: ROOT };
    const made = await build({
      stdin: entry,
      bundle: true,
      format: "iife",
      globalName: "shardStore",
      write: false,
    });
    code = made.outputFiles[0]?.text ?? "";
    // With this feature Chromium reports a made-up quota (usage and 10 GiB); other browsers report the real one.
    browser = await openChromium("--disable-features=StaticStorageQuota");
  }, 180_000);
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

  /** Loads in a tab; gives its warnings. */
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

  /** The bytes on the disk of files that have come in part. */
  const begunBytes = (): Promise<number> =>
    first.evaluate(async () => {
      let size = 0;
      const root = await navigator.storage.getDirectory();
      for await (const handle of (await root.getDirectoryHandle("nearfar-files", { create: true })).values())
        if (handle.name.endsWith(".begun")) size += (await (handle as FileSystemFileHandle).getFile()).size;
      return size;
    });

  const filesOf = (...names: string[]): string[] => {
    const files = names.flatMap((name) => [...(artifacts.get(name)?.files.values() ?? [])]);
    return [...new Set(files.map((bytes) => createHash("sha256").update(bytes).digest("hex")))].sort();
  };

  /** Records requests for an artifact's files from now on, except for its manifest. */
  const asked = (): string[] =>
    server.requests.filter((path) => path.startsWith("toy/") && path !== "toy/manifest.json");

  /** Makes the artifacts unreachable, as without a network; the app itself would have a service worker. */
  const unplug = (): void => {
    server.intercept = (path, response) => !path.startsWith("dist/") && path !== "" && !!response.destroy();
  };

  /** The text of an answer, or what went wrong. */
  const answer = (page: Page, options: { integrity?: string } = {}, url = "/toy/"): Promise<string> =>
    page.evaluate(
      async ([address, given]) => {
        try {
          const engine = await nearfarPackage.createEngine(address, { ...given, onWarning: () => undefined });
          const { choices } = await engine.completions.create({ prompt: "q", max_tokens: 9, temperature: 0 });
          await engine.dispose();
          return choices[0]?.text ?? "";
        } catch (error) {
          return String(error);
        }
      },
      [url, options] as const,
    );

  test("what has been loaded once starts without a network, and with it asks for the manifest alone", async () => {
    expect(await answer(first)).toBe(expectedText("q", 9));
    expect(await namesIn("nearfar-files")).toEqual(filesOf("toy"));
    const cold = asked().length;
    expect(await answer(second)).toBe(expectedText("q", 9));
    expect(asked()).toHaveLength(cold);
    unplug();
    expect(await answer(first)).toBe(expectedText("q", 9));
    expect(asked()).toHaveLength(cold);
  });

  // A proxy answers with these if its server is down, or asks the client to wait.
  test.each([502, 429])(
    "what has been loaded once starts where the server answers HTTP %i",
    async (status) => {
      await load(first, "toy");
      server.intercept = (path, response) => path.startsWith("toy/") && !!response.writeHead(status).end();
      expect(await answer(second)).toBe(expectedText("q", 9));
    },
  );

  test("of an artifact with packs those are kept, and not what lies in them", async () => {
    await load(first, "packed");
    const { files } = artifacts.get("packed") ?? toyArtifact();
    const kept = [...files]
      .filter(([path]) => /^(manifest|packs|weights)/.test(path))
      .map(([, bytes]) => bytes);
    expect(await namesIn("nearfar-files")).toEqual(
      [...new Set(kept.map((bytes) => createHash("sha256").update(bytes).digest("hex")))].sort(),
    );
    const cold = server.requests.length;
    await load(second, "packed");
    expect(server.requests.slice(cold).filter((path) => path.startsWith("packed/"))).toEqual([
      "packed/manifest.json",
    ]);
  });

  test("a new build is noticed; the last one stays whole until the new one is", async () => {
    await answer(first);
    const last = filesOf("toy");
    artifacts.set("toy", toyArtifact({ build: 1 }));
    server.intercept = (path, response) => path.endsWith("00000.bin") && !!response.writeHead(404).end();
    expect(await answer(second)).toContain("00000.bin");
    expect(await namesIn("nearfar-files")).toEqual(expect.arrayContaining(last));
    unplug();
    expect(await answer(second)).toBe(expectedText("q", 9));
    server.intercept = () => false;
    expect(await answer(second)).toBe(expectedText("q", 9));
    expect(await namesIn("nearfar-files")).toEqual(filesOf("toy"));
  });

  test("small files that are spoiled are fetched again; without a network that is said", async () => {
    await answer(first);
    const spoil = (): Promise<void> =>
      first.evaluate(async () => {
        const root = await navigator.storage.getDirectory();
        for await (const handle of (await root.getDirectoryHandle("nearfar-files")).values()) {
          const stream = await (handle as FileSystemFileHandle).createWritable({ keepExistingData: true });
          await stream.write({ type: "write", position: 1, data: new Uint8Array([99, 98]) });
          await stream.close();
        }
      });
    await spoil();
    expect(await answer(second)).toBe(expectedText("q", 9));
    expect(await namesIn("nearfar-files")).toEqual(filesOf("toy"));
    await spoil();
    unplug();
    expect(await answer(second)).toMatch(/cannot be downloaded/);
  });

  test("an expected manifest is held to, and needs no network once it is kept", async () => {
    const hash = createHash("sha256").update(artifacts.get("toy")?.files.get("manifest.json") ?? "");
    const integrity = `sha256-${hash.digest("base64")}`;
    const other = `sha256-${createHash("sha256").update("other").digest("base64")}`;
    expect(await answer(first, { integrity: other })).toMatch(/not the manifest that is expected/);
    expect(asked()).toEqual([]);
    expect(await answer(first, { integrity: "md5-abc" })).toMatch(/integrity has "md5-abc"/);
    expect(await answer(first, { integrity: `${other} ${integrity}` })).toBe(expectedText("q", 9));
    const before = server.requests.filter((path) => path.startsWith("toy/")).length;
    expect(await answer(second, { integrity })).toBe(expectedText("q", 9));
    expect(server.requests.filter((path) => path.startsWith("toy/"))).toHaveLength(before);
  });

  test("models that are kept are listed and deleted; files that others share stay", async () => {
    await load(first, "toy");
    await load(first, "other");
    const listed = await first.evaluate(() => nearfarPackage.cachedModels());
    const bytes = new Set(artifacts.get("toy")?.files.values());
    expect(listed.map(({ url, name, complete }) => [new URL(url).pathname, name, complete])).toEqual([
      ["/other/", "toy", true],
      ["/toy/", "toy", true],
    ]);
    expect(listed[1]?.bytes).toBe(sizeOf([...bytes]));
    expect(await first.evaluate(() => nearfarPackage.deleteModel("/toy"))).toBe(true);
    expect(await namesIn("nearfar-files")).toEqual(filesOf("other"));
    expect(await first.evaluate(() => nearfarPackage.deleteModel("/toy"))).toBe(false);
    expect((await first.evaluate(() => nearfarPackage.cachedModels())).map(({ url }) => url)).toHaveLength(1);
  });

  // With plain CORS headers, as of a bucket, pages of another origin see only the exposed headers.
  test.each(["this", "another"])(
    "a shard of %s origin that had come in part when its tab was closed goes on",
    async (origin) => {
      const ranges: (string | undefined)[] = [];
      const shard = artifacts.get("toy")?.files.get("weights/00001.bin") ?? new Uint8Array();
      const bucket = await serve(async (path) => artifacts.get("toy")?.files.get(path.slice(4)) ?? null);
      const host = origin === "this" ? server : bucket;
      const url = new URL("toy/", host.url).href;
      host.intercept = (path, response) => {
        if (path !== "toy/weights/00001.bin") return false;
        response.setHeader("access-control-allow-origin", "*");
        const { range } = response.req.headers;
        ranges.push(range);
        const from = Number(/^bytes=(\d+)-$/.exec(range ?? "")?.[1] ?? "0");
        if (range) {
          response.writeHead(206, { "content-range": `bytes ${from}-${shard.length - 1}/${shard.length}` });
          response.end(shard.slice(from));
          return true;
        }
        response.writeHead(200, { "content-length": shard.length });
        let sent = 300;
        response.write(shard.slice(0, sent));
        // A byte now and then, so that progress is reported.
        const timer = setInterval(() => response.write(shard.slice(sent, ++sent)), 100);
        response.on("close", () => clearInterval(timer));
        return true;
      };
      await first.evaluate((address) => void nearfarPackage.createEngine(address), url);
      await vi.waitFor(async () => expect(await begunBytes()).toBeGreaterThanOrEqual(300), 30_000);
      await first.close();
      expect(await answer(second, {}, url)).toBe(expectedText("q", 9));
      bucket.close();
      expect(ranges).toEqual([undefined, expect.stringMatching(/^bytes=[3-5]\d\d-$/)]);
      first = second;
      expect(await namesIn("nearfar-files")).toEqual(filesOf("toy"));
    },
  );

  test("where the storage has too little room, a model runs without being kept, and says so", async () => {
    await load(first, "other");
    const kept = await namesIn("nearfar-files");
    const session = await context.newCDPSession(first);
    const usage = await first.evaluate(async () => (await navigator.storage.estimate()).usage ?? 0);
    const { origin } = new URL(first.url());
    const setQuota = (quotaSize: number): Promise<unknown> =>
      session.send("Storage.overrideQuotaForOrigin", { origin, quotaSize });
    await setQuota(1);
    expect(await load(first, "packed")).toEqual([expect.stringMatching(/storage has \d+ bytes too few/)]);
    expect(await namesIn("nearfar-files")).toEqual(kept);
    expect(await first.evaluate(() => nearfarPackage.cachedModels())).toHaveLength(1);
    await setQuota(usage + 1_000_000);
    expect(await load(first, "packed")).toEqual([]);
    expect(await first.evaluate(() => nearfarPackage.cachedModels())).toHaveLength(2);
  });

  test("the browser is asked to keep what was downloaded, unless that is switched off", async () => {
    const asked = (options: { persist?: boolean }): Promise<number> =>
      first.evaluate(async (given) => {
        let asked = 0;
        const { persist } = StorageManager.prototype;
        StorageManager.prototype.persist = function (this: StorageManager) {
          asked += 1;
          return persist.call(this);
        };
        await (await nearfarPackage.createEngine("/toy/", given)).dispose();
        StorageManager.prototype.persist = persist;
        return asked;
      }, options);
    expect(await asked({ persist: false })).toBe(0);
    await first.evaluate(() => nearfarPackage.deleteModel("/toy/"));
    expect(await asked({})).toBe(1);
    expect(await asked({}), "nothing was downloaded").toBe(0);
  });

  test("a shard that one tab writes is whole or absent in another", async () => {
    const writing = first.evaluate(async (name) => {
      const cache = await shardStore.openOpfsCache({
        url: new URL("/a/", location.href),
        name: "a",
        manifest: "{}",
        files: [name],
      });
      for (let round = 0; round < 25; round++) {
        await cache?.delete(name);
        await cache?.put(name, new Uint8Array(2 ** 21));
      }
      return cache !== null;
    }, SHARD);
    const seen = await second.evaluate(async (name) => {
      const cache = await shardStore.openOpfsCache({
        url: new URL("/a/", location.href),
        name: "a",
        manifest: "{}",
        files: [name],
      });
      const lengths = new Set<number>();
      for (let round = 0; round < 300; round++) {
        lengths.add((await cache?.get(name))?.length ?? -1);
        // Like a tab that found no file: both write at once.
        if (round % 20 === 0) await cache?.put(name, new Uint8Array(2 ** 21));
      }
      return [...lengths];
    }, SHARD);
    expect(await writing).toBe(true);
    expect(seen.filter((length) => length !== -1)).toEqual([2 ** 21]);
    expect(await namesIn("nearfar-files")).toEqual([SHARD]);
  });

  test("two cold tabs download an artifact once", async () => {
    expect(await Promise.all([load(first, "toy"), load(second, "toy")])).toEqual([[], []]);
    const cold = asked();
    expect(cold).toHaveLength(new Set(cold).size);
    expect(cold.length).toBeGreaterThan(3);
    expect(await Promise.all([load(first, "toy"), load(second, "toy")])).toEqual([[], []]);
    expect(asked()).toEqual(cold);
  });

  test("the shards of an artifact's last build go, those of others stay", async () => {
    await load(first, "toy");
    await load(second, "other");
    expect(await namesIn("nearfar-files")).toEqual(filesOf("toy", "other"));
    artifacts.set("toy", toyArtifact({ build: 1 }));
    await load(first, "toy");
    expect(await namesIn("nearfar-files")).toEqual(filesOf("toy", "other"));
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
      await spoil("nearfar-files", "abc.123.part", "half");
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
    expect(await namesIn("nearfar-files")).toEqual(filesOf("toy"));
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
      const cache = await shardStore.openOpfsCache({
        url: new URL("/a/", location.href),
        name: "a",
        manifest: "{}",
        files: [name],
      });
      await cache?.put(name, new Uint8Array(4321));
    }, SHARD);
    expect(await namesIn("nearfar-files")).toEqual([...filesOf("toy"), SHARD].sort());
  });

  test("a model that a tab runs gives no room to another, whenever it was loaded", async () => {
    await second.evaluate(async () => {
      globalThis.running = await nearfarPackage.createEngine("/other/");
    });
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
      const cache = await shardStore.openOpfsCache({
        url: new URL("/a/", location.href),
        name: "a",
        manifest: "{}",
        files: [name],
      });
      await cache?.put(name, new Uint8Array(4321));
    }, SHARD);
    expect(await namesIn("nearfar-files")).toEqual([...filesOf("other"), SHARD].sort());
  });
});
