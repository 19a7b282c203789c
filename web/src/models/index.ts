/** What is known of a model before it is loaded: where it is, and whether it would run here. */

import { findArtifacts } from "../both/artifacts.js";
import { DeviceError, type ErrorCode, throwIfAborted } from "../both/errors.js";
import type { BackendName, SealedManifest } from "../both/manifest.js";
import type { LoadSettings } from "../both/messages.js";
import { modelUrl } from "../both/places.js";
import { type Chosen, choose } from "../worker/choice.js";
import { findGpu } from "../worker/gpu/adapter.js";
import { ablePrograms } from "../worker/gpu/device.js";
import { lineUp } from "../worker/gpu/variants.js";
import { type MemoryOptions, type MemoryPlan, whatFits } from "../worker/memory.js";
import { ableProgram, wasmFeatures } from "../worker/wasm/features.js";
import { MOST_BYTES } from "../worker/wasm/layout.js";

export { HUB, modelUrl } from "../both/places.js";
export { type ListedModel, readModels } from "./list.js";

/** How the model would be loaded. */
export interface SupportOptions
  extends Pick<LoadSettings, "kvMemory" | "kvBits" | "contextLength" | "program" | "backend"> {
  readonly signal?: AbortSignal;
}

/** What a load would come to. */
export interface Support {
  readonly supported: boolean;
  /** Why this backend, or what lacks; for people. */
  readonly reason: string;
  /** What lacks, for programs (docs/errors.md); null where nothing does. */
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
  /**
   * Of the first load: weights, tokenizer, and the pack of the program. In an artifact without packs, kernels
   * and plans come to it, which are mostly far less.
   */
  readonly downloadBytes: number;
  /** How long that takes at the speed that the browser tells of its connection (Chromium); null elsewhere. */
  readonly downloadSeconds: number | null;
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
      return { supported: true, reason, code: null, backend, program, ...plan, ...facts(manifest, program) };
    } catch (error) {
      if (!(error instanceof DeviceError)) throw error;
      next = next.other(error);
      if (next) continue;
      const nothing = { backend: null, program: null, contextLength: 0, kvBytes: 0 };
      const { message: reason, code } = error;
      return { supported: false, reason, code, ...nothing, ...facts(manifest, null) };
    }
  }
}

interface Planned {
  readonly program: string;
  readonly plan: Pick<MemoryPlan, "contextLength" | "kvBytes">;
}

/** As the load does it, without allocating; DeviceError where it could not. */
async function planned(manifest: SealedManifest, options: SupportOptions): Promise<Planned> {
  const { kvMemory, contextLength } = options;
  const memory: MemoryOptions = { kvMemory, contextLength };
  if (manifest.target === "wasm") {
    const threads = globalThis.crossOriginIsolated ?? true;
    const program = ableProgram(manifest, wasmFeatures(threads), threads ? 2 : 1, options);
    const plan = await whatFits(manifest, program, MOST_BYTES, memory, (made) => fitting(manifest, made));
    return { program: program.name, plan: briefly(plan) };
  }
  const { adapter, abilities, deviceClass } = await findGpu();
  const able = ablePrograms(manifest, abilities, options);
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

function facts(manifest: SealedManifest, program: string | null) {
  const { model, weights, tokenizerFiles, packs, quantization, license } = manifest;
  const bytesOf = (of: string | null): number | undefined => packs.find((pack) => pack.program === of)?.bytes;
  const tokenizer = bytesOf(null) ?? tokenizerFiles.reduce((sum, { bytes }) => sum + bytes, 0);
  const code = program === null ? 0 : (bytesOf(program) ?? 0);
  const downloadBytes = weights.bytes + tokenizer + code;
  return {
    weightBytes: weights.bytes,
    downloadBytes,
    downloadSeconds: secondsFor(downloadBytes),
    name: model.name,
    quantization,
    license,
  };
}

/** `downlink` is in megabits a second (https://wicg.github.io/netinfo/), and 0 without a network. */
function secondsFor(bytes: number): number | null {
  const { connection } = (globalThis.navigator ?? {}) as { readonly connection?: { downlink?: number } };
  return connection?.downlink ? (8 * bytes) / (connection.downlink * 1e6) : null;
}
