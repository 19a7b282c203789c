/** Options of engines, checked where they are given: unknown names and senseless values are rejected. */

import type { BackendName } from "../protocol/backends.js";
import { RequestError } from "../protocol/errors.js";
import type { LoadProgress, LoadSettings, ProfileOptions } from "../protocol/messages.js";
import type { ContextPolicy } from "../protocol/openai.js";
import type { WorkerPort } from "../protocol/ports.js";
import { checkKinds, FLAG, NUMBER, POLICY, SIGNAL, TEXT, type ValueKind } from "./requests.js";

/** How an engine loads, and what it reports meanwhile. */
export interface EngineOptions extends LoadSettings {
  /**
   * Called while the model is loading, and later while kernels are compiled for an answer, or a lost GPU is
   * reopened.
   */
  readonly onProgress?: (progress: LoadProgress) => void;
  /** Called with warnings that stop nothing; console.warn by default. */
  readonly onWarning?: (message: string) => void;
  /** Ends the loading, which rejects with the signal's reason, and frees everything. */
  readonly signal?: AbortSignal;
  /**
   * Makes the engine's worker, for bundlers that need to make it themselves. The engine owns the worker from
   * then on.
   */
  readonly worker?: () => WorkerPort | Promise<WorkerPort>;
  /** What to do with conversations that do not fit the context; "error" by default. */
  readonly contextPolicy?: ContextPolicy;
  /**
   * Whether to ask the browser to store this site's data permanently (`navigator.storage.persist()`), once a
   * model has been downloaded; true by default. Firefox asks the user, others decide by themselves.
   */
  readonly persist?: boolean;
  /**
   * Seconds that the worker may be silent while a reply is awaited, before it counts as hanging; 120 by
   * default. Time in which the page is frozen, or the machine sleeps, does not count.
   */
  readonly patience?: number;
}

const CALLED: ValueKind = ["a function", (value) => typeof value === "function"];
const PATIENCE: ValueKind = [
  "a number of seconds above 0",
  (value) => typeof value === "number" && value > 0,
];

const BACKENDS: Readonly<Record<BackendName, true>> = { webgpu: true, wasm: true };
const BACKEND: ValueKind = [
  Object.keys(BACKENDS).join(" or "),
  (value) => typeof value === "string" && Object.hasOwn(BACKENDS, value),
];

const OPTIONS: Readonly<Record<keyof EngineOptions, ValueKind>> = {
  kvMemory: NUMBER,
  kvBits: NUMBER,
  contextLength: NUMBER,
  program: TEXT,
  backend: BACKEND,
  threads: NUMBER,
  integrity: TEXT,
  onProgress: CALLED,
  onWarning: CALLED,
  signal: SIGNAL,
  worker: CALLED,
  contextPolicy: POLICY,
  patience: PATIENCE,
  persist: FLAG,
};
const PROFILE: Readonly<Record<keyof ProfileOptions, ValueKind>> = {
  rows: NUMBER,
  context: NUMBER,
  rounds: NUMBER,
};

export function checkEngineOptions(options: object): void {
  checkKinds(options, OPTIONS, "options", unknown(OPTIONS));
}

export function checkProfileOptions(options: object): void {
  checkKinds(options, PROFILE, "options", unknown(PROFILE));
}

function unknown(known: object): (name: string, value: unknown) => void {
  return (name, value) => {
    if (value === undefined) return;
    throw new RequestError(`unknown option ${name}: there are ${Object.keys(known).join(", ")}`, name);
  };
}
