import { useEffect, useState } from "react";
import type { Engine } from "../page/client.js";
import type { EngineOptions } from "../page/options.js";
import { later } from "../protocol/errors.js";
import type { LoadProgress } from "../protocol/messages.js";
import { useLatest } from "./latest.js";

/** Options of the engine; the hook itself takes care of progress and of the engine's end. */
export interface UseEngineOptions extends Omit<EngineOptions, "signal" | "onProgress"> {
  /** What loads the model instead of the package's own `createEngine`: that of nearfar/here, or an app's. */
  readonly createEngine?: (url: string | URL, options: EngineOptions) => Promise<Engine>;
  /**
   * How often an engine that is lost (`engine.lost`: its worker died, its GPU is gone for good) is loaded anew,
   * before that is an error; 0 by default.
   */
  readonly reloads?: number;
}

/** `progress`: what was told last, also after the load (a GPU that is opened anew). */
export type EngineState =
  | { readonly status: "idle"; readonly progress: null; readonly engine: null; readonly error: null }
  | {
      readonly status: "loading";
      readonly progress: LoadProgress | null;
      readonly engine: null;
      readonly error: null;
    }
  | {
      readonly status: "ready";
      readonly progress: LoadProgress | null;
      readonly engine: Engine;
      readonly error: null;
    }
  | { readonly status: "error"; readonly progress: null; readonly engine: null; readonly error: Error };

const IDLE: EngineState = { status: "idle", progress: null, engine: null, error: null };
const LOADING: EngineState = { status: "loading", progress: null, engine: null, error: null };

/**
 * Loads the model at `url` while the component is mounted; a load that is left is aborted, an engine
 * disposed. One that is lost is an error, or is loading again by `reloads`. Another `url` loads another model;
 * of the options those count that a load begins with.
 */
export function useEngine(url: string | URL | null, options: UseEngineOptions = {}): EngineState {
  const [state, setState] = useState<EngineState>(url === null ? IDLE : LOADING);
  const latest = useLatest(options);
  const address = url === null ? null : String(url);
  useEffect(() => {
    if (address === null) {
      setState(IDLE);
      return;
    }
    setState(LOADING);
    const left = new AbortController();
    const told = (next: (state: EngineState) => EngineState): void => {
      if (!left.signal.aborted) setState(next);
    };
    void whileMounted(address, latest.current, left.signal, told);
    return () => left.abort();
  }, [address, latest]);
  return state;
}

async function whileMounted(
  url: string,
  { createEngine, reloads = 0, ...options }: UseEngineOptions,
  signal: AbortSignal,
  told: (next: (state: EngineState) => EngineState) => void,
): Promise<void> {
  // StrictMode mounts, unmounts and mounts in one go: the first of them does not get to load anything.
  await null;
  if (signal.aborted) return;
  const onProgress = (progress: LoadProgress): void =>
    told((state) => (state.engine || state.status === "loading" ? { ...state, progress } : state));
  try {
    const create =
      createEngine ?? (await later(() => import("../page/index.js"), "The engine's code")).createEngine;
    const engine = await create(url, { ...options, signal, onProgress });
    signal.addEventListener("abort", () => void engine.dispose());
    if (signal.aborted) await engine.dispose();
    for (let left = reloads; !signal.aborted; left--) {
      told(({ progress }) => ({ status: "ready", progress, engine, error: null }));
      const reason = await engine.lost;
      if (left <= 0) throw reason;
      told(() => LOADING);
      await engine.reload({ signal });
    }
  } catch (failure) {
    const error = failure instanceof Error ? failure : new Error(String(failure));
    told(() => ({ status: "error", progress: null, engine: null, error }));
  }
}
