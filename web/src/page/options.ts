/** Options of engines, checked where they are given: a name or value that means nothing is refused. */

import type { BackendName } from "../artifact/manifest.js";
import { RequestError } from "../protocol/errors.js";
import type { ProfileOptions } from "../protocol/messages.js";
import type { EngineOptions } from "./client.js";
import { checkKinds, FLAG, type Kind, NUMBER, POLICY, SIGNAL, TEXT } from "./requests.js";

const CALLED: Kind = ["a function", (value) => typeof value === "function"];
const PATIENCE: Kind = ["a number of seconds above 0", (value) => typeof value === "number" && value > 0];

const BACKENDS: Readonly<Record<BackendName, true>> = { webgpu: true, wasm: true };
const BACKEND: Kind = [
  Object.keys(BACKENDS).join(" or "),
  (value) => typeof value === "string" && Object.hasOwn(BACKENDS, value),
];

const OPTIONS: Readonly<Record<keyof EngineOptions, Kind>> = {
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
const PROFILE: Readonly<Record<keyof ProfileOptions, Kind>> = {
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
