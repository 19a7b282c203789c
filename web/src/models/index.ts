/** What is known of a model before it is loaded: where it is, and whether it would run here. */

import { findArtifacts } from "../both/artifacts.js";
import { DeviceError, type ErrorCode, throwIfAborted } from "../both/errors.js";
import type { BackendName, SealedManifest } from "../both/manifest.js";
import type { LoadSettings } from "../both/messages.js";
import { modelUrl } from "../both/places.js";
import { type Chosen, choose } from "../worker/choice.js";
import { ablePrograms, findGpu } from "../worker/gpu/device.js";
import { lineUp } from "../worker/gpu/variants.js";
import { type MemoryOptions, type MemoryPlan, whatFits } from "../worker/memory.js";
import { ableProgram, wasmFeatures } from "../worker/wasm/features.js";
import { MOST_BYTES } from "../worker/wasm/layout.js";

export { HUB, modelUrl } from "../both/places.js";
export { type ListedModel, readModels } from "./list.js";

export interface SupportOptions
  extends Pick<LoadSettings, "kvMemory" | "contextLength" | "program" | "backend"> {
  readonly signal?: AbortSignal;
}

/** What a load would come to. */
export interface Support {
  readonly supported: boolean;
  /** Why this backend, or what lacks; for people. */
  readonly reason: string;
  /** What lacks, for programs (docs/web-errors.md); null where nothing does. */
  readonly code: ErrorCode | null;
  /** Null where none can run it. */
  readonly backend: BackendName | null;
  /** The program that suits this device; a GPU with several may find another one quicker. */
  readonly program: string | null;
  /** Tokens; 0 where nothing runs it. */
  readonly contextLength: number;
  readonly kvBytes: number;
  /** In the device's memory, and of the download. */
  readonly weightBytes: number;
  /** Of the first load: weights and tokenizer. Kernels and plans, mostly far less, come to it. */
  readonly downloadBytes: number;
  readonly name: string;
  readonly quantization: string;
  readonly license: string | null;
}

/**
 * Whether the model would run here, with which context and after how large a download, from its manifest
 * alone. How much memory a GPU has free no browser tells: a load may still find too little.
 *
 * @throws ArtifactError where there is no such model, RequestError, or the reason of `signal`.
 */
export async function isSupported(model: string | URL, options: SupportOptions = {}): Promise<Support> {
  throwIfAborted(options.signal);
  const artifacts = await findArtifacts(modelUrl(model), options.backend, { signal: options.signal });
  let next: Chosen | null = await choose(artifacts, options.backend);
  for (;;) {
    const { manifest } = next.found;
    try {
      const { program, plan } = await planned(manifest, options);
      const { reason, name: backend } = next.choice;
      return { supported: true, reason, code: null, backend, program, ...plan, ...facts(manifest) };
    } catch (error) {
      if (!(error instanceof DeviceError)) throw error;
      next = next.other(error);
      if (next) continue;
      const nothing = { backend: null, program: null, contextLength: 0, kvBytes: 0 };
      const { message: reason, code } = error;
      return { supported: false, reason, code, ...nothing, ...facts(manifest) };
    }
  }
}

interface Planned {
  readonly program: string;
  readonly plan: Pick<MemoryPlan, "contextLength" | "kvBytes">;
}

/** As the load does it, without allocating; DeviceError where it could not. */
async function planned(manifest: SealedManifest, options: SupportOptions): Promise<Planned> {
  const { kvMemory, contextLength, program: pinned } = options;
  const memory: MemoryOptions = { kvMemory, contextLength };
  if (manifest.target === "wasm") {
    const threads = globalThis.crossOriginIsolated ?? true;
    const program = ableProgram(manifest, wasmFeatures(threads), threads ? 2 : 1, pinned);
    const plan = await whatFits(manifest, program, MOST_BYTES, memory, (made) => fitting(manifest, made));
    return { program: program.name, plan: briefly(plan) };
  }
  const { adapter, abilities, deviceClass } = await findGpu();
  const able = ablePrograms(manifest, abilities, pinned);
  const [program = able[0]] = lineUp(able, deviceClass);
  const limit = adapter.limits.maxStorageBufferBindingSize;
  const plan = await whatFits(manifest, program, limit, memory, (made) => made);
  return { program: program.name, plan: briefly(plan) };
}

function briefly({ contextLength, kvBytes }: MemoryPlan): Planned["plan"] {
  return { contextLength, kvBytes };
}

function fitting({ weights }: SealedManifest, plan: MemoryPlan): MemoryPlan {
  const bytes = weights.bytes + plan.kvBytes;
  if (bytes <= MOST_BYTES) return plan;
  throw new DeviceError(
    `Weights and cache need ${bytes} bytes, and WebAssembly has ${MOST_BYTES} at most. Use a smaller or ` +
      "more quantized model.",
    { code: "out-of-memory" },
  );
}

function facts({ model, weights, tokenizerFiles, quantization, license }: SealedManifest) {
  const tokenizer = tokenizerFiles.reduce((sum, { bytes }) => sum + bytes, 0);
  const downloadBytes = weights.bytes + tokenizer;
  return { weightBytes: weights.bytes, downloadBytes, name: model.name, quantization, license };
}
