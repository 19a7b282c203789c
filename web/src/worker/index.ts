import { serve, type WorkerScope } from "./serve.js";
import { THREAD, type ThreadPort, type ThreadTask, type ThreadWord, work } from "./wasm/threads.js";

/** The dedicated worker's entry: the engine's own, or, by its name, that of one of its threads. */

/** Part of the worker's global, whose types cannot be loaded beside those of the window. */
interface Scope extends WorkerScope {
  readonly name?: string;
  readonly location?: { readonly href: string };
  close(): void;
}

const scope = globalThis as unknown as Scope;

if (scope.name === THREAD) beThread();
else serve(scope, { spawn: sharesMemory() ? spawn : null, hardwareThreads: hardwareThreads() });

function hardwareThreads(): number {
  return (globalThis.navigator as Navigator | undefined)?.hardwareConcurrency ?? 1;
}

/** Whether other workers can have the memory of this one. */
function sharesMemory(): boolean {
  return globalThis.crossOriginIsolated === true && typeof Worker === "function";
}

/** This very file once more: it is there, wherever a bundler has put it and whatever policy the page has. */
function spawn(): ThreadPort {
  const worker = new Worker(scope.location?.href ?? "", { type: "module", name: THREAD });
  return {
    start: (task) => worker.postMessage(task),
    listen: (onWord) => {
      worker.addEventListener("message", ({ data }: MessageEvent<ThreadWord>) => onWord(data));
      worker.addEventListener("error", ({ message }) =>
        onWord({ type: "failed", message: message || "its worker did not start" }),
      );
    },
    end: () => worker.terminate(),
  };
}

function beThread(): void {
  const { addEventListener, postMessage } = globalThis as unknown as {
    addEventListener(type: "message", listener: (event: { readonly data: ThreadTask }) => void): void;
    postMessage(word: ThreadWord): void;
  };
  addEventListener("message", ({ data }) => {
    work(data, (word) => postMessage(word));
    scope.close();
  });
}
