import { useEffect, useState } from "react";
import type { Engine } from "../page/client.js";
import type { EngineOptions } from "../page/options.js";
import { later } from "../protocol/errors.js";
import type { LoadProgress } from "../protocol/messages.js";
import { useLatest } from "./latest.js";

/** Options of the engine; the hook itself handles progress and disposes of the engine. */
export interface UseEngineOptions extends Omit<EngineOptions, "signal" | "onProgress"> {
  /**
   * A function that loads the model in place of the package's own `createEngine`: the function of
   * nearfar/here, or an app's own.
   */
  readonly createEngine?: (url: string | URL, options: EngineOptions) => Promise<Engine>;
  /**
   * How often a lost engine (`engine.lost`: its worker died, or its GPU is gone for good) is loaded again
   * before the state becomes an error; 0 by default.
   */
  readonly reloads?: number;
}

/**
 * The state of the engine. `progress` is the last reported progress, also after the load, when a GPU is
 * reopened.
 */
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
 * Loads the model at `url` while the component is mounted. Unmounting aborts the load or disposes of the
 * engine. A lost engine becomes an error, or is loaded again as `reloads` allows. Another `url` loads another
 * model; changed options take effect with the next load.
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
  // StrictMode mounts, unmounts and mounts again at once; the first mount must not begin to load.
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
