import { useEffect, useRef, useState } from "react";
import type { LoadProgress } from "../both/messages.js";
import type { Engine, EngineOptions } from "../page/client.js";

export interface UseEngineOptions extends Omit<EngineOptions, "signal" | "onProgress"> {
  /** What loads the model instead of the package's own `createEngine`: that of nearfar/here, or an app's. */
  readonly createEngine?: (url: string | URL, options: EngineOptions) => Promise<Engine>;
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
 * disposed. Another `url` loads another model; of the options those count that a load begins with.
 */
export function useEngine(url: string | URL | null, options: UseEngineOptions = {}): EngineState {
  const [state, setState] = useState<EngineState>(url === null ? IDLE : LOADING);
  const latest = useRef(options);
  useEffect(() => {
    latest.current = options;
  });
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
  }, [address]);
  return state;
}

async function whileMounted(
  url: string,
  { createEngine, ...options }: UseEngineOptions,
  signal: AbortSignal,
  told: (next: (state: EngineState) => EngineState) => void,
): Promise<void> {
  // StrictMode mounts, unmounts and mounts in one go: the first of them does not get to load anything.
  await null;
  if (signal.aborted) return;
  const onProgress = (progress: LoadProgress): void =>
    told((state) => (state.engine || state.status === "loading" ? { ...state, progress } : state));
  try {
    const create = createEngine ?? (await import("../page/index.js")).createEngine;
    const engine = await create(url, { ...options, signal, onProgress });
    signal.addEventListener("abort", () => void engine.dispose());
    if (signal.aborted) await engine.dispose();
    told(({ progress }) => ({ status: "ready", progress, engine, error: null }));
  } catch (failure) {
    const error = failure instanceof Error ? failure : new Error(String(failure));
    told(() => ({ status: "error", progress: null, engine: null, error }));
  }
}
