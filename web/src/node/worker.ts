/**
 * The worker's entry in Node, Deno and Bun. Its data says whether it is the engine's worker, one of its
 * threads, or the worker that follows grammars.
 */

import { readFile } from "node:fs/promises";
import { availableParallelism } from "node:os";
import { parentPort, Worker, workerData } from "node:worker_threads";
import { type FromGrammars, GRAMMARS, type GrammarPort } from "../grammar/words.js";
import type { ThreadPort, ThreadWord } from "../worker/host.js";
import { THREAD } from "../worker/host.js";
import { follow } from "../worker/parts/follow.js";
import { parts } from "../worker/parts/index.js";
import { serve } from "../worker/session/serve.js";
import { work } from "../worker/wasm/thread.js";

if (!parentPort) throw new Error("nearfar's worker is started by createEngine of nearfar/node");
const port = parentPort;

if (workerData === THREAD)
  port.once("message", (task) => {
    work(task, (word) => port.postMessage(word));
    port.close();
  });
else if (workerData === GRAMMARS)
  port.on(
    "message",
    follow((word) => port.postMessage(word)),
  );
else
  serve(
    {
      postMessage: (message) => port.postMessage(message),
      addEventListener: (_, listener) => port.on("message", (data) => listener({ data })),
    },
    { fetch: fetchOrRead, spawn, grammars, hardwareThreads: availableParallelism() },
    parts,
  );

/** `fetch` that reads files too. */
async function fetchOrRead(url: URL, init: RequestInit): Promise<Response> {
  if (url.protocol !== "file:") return fetch(url, init as Parameters<typeof fetch>[1]);
  try {
    return new Response(await readFile(url, { signal: init.signal ?? undefined }));
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== "ENOENT") throw error;
    return new Response(null, { status: 404, statusText: "Not Found" });
  }
}

function spawn(): ThreadPort {
  const worker = new Worker(new URL(import.meta.url), { workerData: THREAD });
  return {
    start: (task) => worker.postMessage(task),
    listen: (onWord) => {
      worker.on("message", (word: ThreadWord) => onWord(word));
      worker.on("error", (error) => onWord({ type: "failed", message: String(error) }));
    },
    end: () => void worker.terminate(),
  };
}

function grammars(): GrammarPort {
  const worker = new Worker(new URL(import.meta.url), { workerData: GRAMMARS });
  return {
    post: (word) => worker.postMessage(word),
    listen: (onWord) => {
      worker.on("message", (word: FromGrammars) => onWord(word));
      worker.on("error", (error) => onWord({ type: "failed", message: String(error), code: "unsupported" }));
    },
    end: () => void worker.terminate(),
  };
}
