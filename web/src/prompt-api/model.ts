import type { Engine } from "../page/client.js";
import type { EngineOptions } from "../page/options.js";
import { later } from "../protocol/errors.js";
import type { LoadProgress, ModelCard } from "../protocol/messages.js";
import type { Availability, MonitorCallback } from "./types.js";

/** The part of an Engine that sessions use. The context length and the token counts are the device's. */
export type PromptEngine = Pick<Engine, "chat" | "countTokens" | "dispose"> & {
  readonly model: Pick<ModelCard, "name" | "contextLength"> & Partial<Pick<ModelCard, "features">>;
};

/**
 * An artifact's address, or a function that loads an engine; the function should obey `signal` and call
 * `onProgress`.
 */
export type ModelSource =
  | string
  | URL
  | ((options: Required<Pick<EngineOptions, "signal" | "onProgress">>) => Promise<PromptEngine>);

interface Loading {
  readonly engine: Promise<PromptEngine>;
  readonly controller: AbortController;
  waiting: number;
}

/** The one model of all sessions. */
export class Model {
  #loading: Loading | null = null;
  #engine: PromptEngine | null = null;
  #loaded = 0;
  readonly #listeners = new Set<(loaded: number) => void>();

  constructor(private readonly source: ModelSource) {}

  get availability(): Availability {
    if (this.#engine) return "available";
    return this.#loading ? "downloading" : "downloadable";
  }

  /**
   * Loads the engine once for all callers. A caller that aborts stops waiting; the load ends when no caller
   * waits any more.
   */
  async load({
    signal,
    monitor,
  }: {
    signal?: AbortSignal;
    monitor?: MonitorCallback;
  }): Promise<PromptEngine> {
    const tell = monitor && listenerOf(monitor);
    tell?.(0);
    const loading = this.#engine ? null : this.#begin();
    if (tell && loading) this.#listeners.add(tell);
    try {
      const engine = this.#engine ?? (await this.#await(loading as Loading, signal));
      tell?.(1);
      return engine;
    } finally {
      if (tell) this.#listeners.delete(tell);
    }
  }

  async unload(): Promise<void> {
    this.#loading?.controller.abort();
    this.#loading = null;
    const engine = this.#engine;
    this.#engine = null;
    await engine?.dispose();
  }

  #begin(): Loading {
    if (this.#loading) return this.#loading;
    const controller = new AbortController();
    const loading = { engine: this.#load(controller.signal), controller, waiting: 0 };
    this.#loading = loading;
    const over = (): void => {
      if (this.#loading === loading) this.#loading = null;
    };
    loading.engine.then(over, over);
    return loading;
  }

  async #load(signal: AbortSignal): Promise<PromptEngine> {
    this.#loaded = 0;
    const onProgress = (progress: LoadProgress): void => {
      if (progress.phase !== "weights" || progress.loaded >= progress.total) return;
      const loaded = progress.loaded / progress.total;
      // The standard's progress never goes back, and its last event is 1.
      if (loaded <= this.#loaded) return;
      this.#loaded = loaded;
      for (const tell of this.#listeners) tell(loaded);
    };
    const engine = await open(this.source, { signal, onProgress });
    if (signal.aborted) await engine.dispose();
    signal.throwIfAborted();
    this.#engine = engine;
    return engine;
  }

  #await(loading: Loading, signal: AbortSignal | undefined): Promise<PromptEngine> {
    loading.waiting++;
    return new Promise((resolve, reject) => {
      const leave = (): void => {
        reject(signal?.reason);
        if (--loading.waiting > 0) return;
        if (this.#loading === loading) this.#loading = null;
        loading.controller.abort();
      };
      signal?.addEventListener("abort", leave, { once: true });
      const settled = (): void => signal?.removeEventListener("abort", leave);
      loading.engine.then(resolve, reject).finally(settled);
    });
  }
}

async function open(
  source: ModelSource,
  options: Required<Pick<EngineOptions, "signal" | "onProgress">>,
): Promise<PromptEngine> {
  if (typeof source === "function") return source(options);
  const { createEngine } = await later(() => import("../page/index.js"), "The engine's code");
  return createEngine(source, options);
}

/**
 * Reports progress to a monitor as the standard does, with plain events where ProgressEvent is missing, as in
 * Node.
 */
function listenerOf(monitor: MonitorCallback): (loaded: number) => void {
  const target = new EventTarget();
  monitor(target);
  return (loaded) => {
    const values = { loaded, total: 1, lengthComputable: true };
    target.dispatchEvent(
      typeof ProgressEvent === "function"
        ? new ProgressEvent("downloadprogress", values)
        : Object.assign(new Event("downloadprogress"), values),
    );
  };
}
