import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { Worker } from "node:worker_threads";
import { beforeAll, describe, expect, test } from "vitest";
import { openManifest } from "../src/artifact/reader.js";
import type { ThreadPort, ThreadWord } from "../src/worker/host.js";
import { THREAD } from "../src/worker/host.js";
import { loadWasm } from "../src/worker/wasm/load.js";
import { builtPackage } from "./support/built.js";

/** Threads of Node over a real artifact: the folder that NEARFAR_WASM_ARTIFACT names. */
const REAL = process.env.NEARFAR_WASM_ARTIFACT ?? null;

describe.skipIf(!REAL)("threads of a real module (NEARFAR_WASM_ARTIFACT)", { timeout: 60_000 }, () => {
  const base = pathToFileURL(`${REAL}/`);
  let folder = "";

  beforeAll(async () => {
    folder = join((await builtPackage()).folder, "dist/node");
  }, 180_000);

  function spawn(): ThreadPort {
    const worker = new Worker(join(folder, "worker.js"), { workerData: THREAD });
    return {
      start: (task) => worker.postMessage(task),
      listen: (onWord) => {
        worker.on("message", (word: ThreadWord) => onWord(word));
        worker.on("error", (error) => onWord({ type: "failed", message: String(error) }));
      },
      end: () => void worker.terminate(),
    };
  }

  async function load() {
    const manifest = await openManifest(await readFile(new URL("manifest.json", base), "utf8"));
    const fetch = async (url: URL): Promise<Response> => new Response(await readFile(url));
    const host = { spawn, grammars: null, hardwareThreads: 2 };
    return loadWasm(base, manifest, { host, fetch, cache: null, threads: 2, kvMemory: 2 ** 23 });
  }

  test("whichever thread traps, the step fails by name and nobody waits for ever", async () => {
    for (const bad of [0, 7, 15]) {
      const { executor } = await load();
      expect(executor.held?.threads).toBe(2);
      // Positions of 16 pages, in rows of one step.
      const pages = Int32Array.from({ length: 16 }, (_, page) => page);
      executor.write("page_table.0", pages);
      executor.write(
        "positions",
        Int32Array.from({ length: 256 }, (_, row) => row),
      );
      executor.write("tokens", new Int32Array(256).fill(3));
      executor.run("step", 256);
      expect(await executor.fetch([{ buffer: "sampled", count: 1 }])).toHaveLength(1);
      // Far outside the cache, and the memory.
      pages[bad] = 2 ** 19;
      executor.write("page_table.0", pages);
      executor.run("step", 256);
      const failed = executor.fetch([{ buffer: "sampled", count: 1 }]);
      await expect(failed).rejects.toThrow(/of step\.256 (trapped|failed: one of its threads trapped)/);
      executor.run("step", 256);
      await expect(executor.fetch([{ buffer: "sampled", count: 1 }])).rejects.toThrow(/of step\.256/);
      executor.dispose();
    }
  });
});
