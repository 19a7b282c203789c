/** Facts about a model before it is loaded: where it is, and whether it would run here. */

import { type Found, findArtifacts } from "../artifact/artifacts.js";
import type { SealedManifest } from "../artifact/manifest.js";
import { modelUrl } from "../artifact/places.js";
import type { BackendName } from "../protocol/backends.js";
import { DeviceError, type ErrorCode, throwIfAborted } from "../protocol/errors.js";
import type { LoadSettings } from "../protocol/messages.js";
import { keptManifest } from "../storage/file-cache.js";
import { type MemoryOptions, type MemoryPlan, whatFits } from "../worker/device/memory.js";
import { findGpu } from "../worker/gpu/adapter.js";
import { ablePrograms } from "../worker/gpu/device.js";
import { lineUp } from "../worker/gpu/variants.js";
import { type Chosen, choose } from "../worker/loading/choice.js";
import { ableProgram, wasmFeatures } from "../worker/wasm/features.js";
import { MOST_BYTES } from "../worker/wasm/layout.js";
import { type Compiling, compilingOf, compilingOfLibrary, type Speed, speedFrom } from "./times.js";

export { HUB, modelUrl } from "../artifact/places.js";
export { type ListedModel, readModels } from "./list.js";

/** How the model would be loaded. */
export interface SupportOptions
  extends Pick<LoadSettings, "kvMemory" | "kvBits" | "contextLength" | "program" | "backend"> {
  readonly signal?: AbortSignal;
}

/** The prediction of a load. */
export interface Support {
  readonly supported: boolean;
  /** Why this backend was chosen, or what is missing, for people. */
  readonly reason: string;
  /** What is missing, for programs (docs/errors.md); null if nothing is missing. */
  readonly code: ErrorCode | null;
  /** The backend; null if none can run the model. */
  readonly backend: BackendName | null;
  /**
   * The program that suits this device; on a GPU with several programs, a trial may find another one quicker.
   */
  readonly program: string | null;
  /** The context length in tokens; 0 if nothing runs the model. */
  readonly contextLength: number;
  readonly kvBytes: number;
  /** Bytes of the weights, in the device's memory and of the download. */
  readonly weightBytes: number;
  /**
   * Bytes of the first load: weights, tokenizer, and the program's bundle file. An artifact without bundle
   * files adds kernels and plans, which are mostly far less.
   */
  readonly downloadBytes: number;
  /** Predicted seconds of the download; null where the speed is unknown. */
  readonly downloadSeconds: number | null;
  /** Predicted seconds to compile the program; null if no program runs, or the manifest has no size. */
  readonly compileSeconds: number | null;
  /**
   * Predicted seconds of the whole first load: WebGPU compiles while the weights are downloaded, WebAssembly
   * before that.
   */
  readonly loadSeconds: number | null;
  /**
   * The source of the seconds. For the download: `loads` of models from that origin, or one of two estimates
   * that are mostly too slow, the `manifest`, which was just fetched, and the browser's report of its
   * `connection`. For the compiler: `loads` on this adapter, or an `estimate` from the size of the program.
   */
  readonly basis: {
    readonly download: Speed["basis"] | null;
    readonly compile: "loads" | "estimate" | null;
  };
  readonly name: string;
  readonly quantization: string;
  readonly license: string | null;
}

/**
 * Predicts from the manifest alone whether the model would run here, with which context length and after how
 * large a download. No browser reports how much memory a GPU has free, so a load may still find too little.
 *
 * @throws ArtifactError if there is no such model, RequestError, or the reason of `signal`.
 */
export async function isSupported(model: string | URL, options: SupportOptions = {}): Promise<Support> {
  throwIfAborted(options.signal);
  const artifacts = await findArtifacts(modelUrl(model), options.backend, {
    signal: options.signal,
    kept: keptManifest,
  });
  let next: Chosen | null = await choose(artifacts, options.backend);
  for (;;) {
    const { found } = next;
    try {
      const { program, plan, compiling } = await planned(found.manifest, options);
      const { reason, name: backend } = next.choice;
      const able = { supported: true, reason, code: null, backend, program, ...plan };
      return { ...able, ...facts(found, program, compiling) };
    } catch (error) {
      if (!(error instanceof DeviceError)) throw error;
      next = next.other(error);
      if (next) continue;
      const nothing = { backend: null, program: null, contextLength: 0, kvBytes: 0 };
      const { message: reason, code } = error;
      return { supported: false, reason, code, ...nothing, ...facts(found, null, null) };
    }
  }
}

interface Planned {
  readonly program: string;
  readonly plan: Pick<MemoryPlan, "contextLength" | "kvBytes">;
  readonly compiling: Compiling | null;
}

/** Plans as the load does, without allocating; DeviceError where the load would fail. */
async function planned(manifest: SealedManifest, options: SupportOptions): Promise<Planned> {
  const { kvMemory, contextLength } = options;
  const memory: MemoryOptions = { kvMemory, contextLength };
  if (manifest.target === "wasm") {
    const threads = globalThis.crossOriginIsolated ?? true;
    const program = ableProgram(manifest, wasmFeatures(threads), threads ? 2 : 1, options);
    const plan = await whatFits(manifest, program, MOST_BYTES, memory, (made) => fitting(manifest, made));
    return {
      program: program.name,
      plan: briefly(plan),
      compiling: compilingOfLibrary(program, manifest.packs),
    };
  }
  const gpu = await findGpu();
  const { adapter, abilities, deviceClass } = gpu;
  const able = ablePrograms(manifest, abilities, options);
  const [program = able[0]] = lineUp(able, deviceClass);
  const limit = adapter.limits.maxStorageBufferBindingSize;
  const plan = await whatFits(manifest, program, limit, memory, (made) => made);
  return { program: program.name, plan: briefly(plan), compiling: compilingOf(program, gpu) };
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

function facts({ base, manifest }: Found, program: string | null, compiling: Compiling | null) {
  const { model, weights, tokenizerFiles, packs, quantization, license } = manifest;
  const bytesOf = (of: string | null): number | undefined => packs.find((pack) => pack.program === of)?.bytes;
  const tokenizer = bytesOf(null) ?? tokenizerFiles.reduce((sum, { bytes }) => sum + bytes, 0);
  const code = program === null ? 0 : (bytesOf(program) ?? 0);
  const downloadBytes = weights.bytes + tokenizer + code;
  const speed = speedFrom(new URL("manifest.json", base));
  const downloadSeconds = speed && downloadBytes / speed.bytesPerSecond;
  return {
    weightBytes: weights.bytes,
    downloadBytes,
    downloadSeconds,
    compileSeconds: compiling?.seconds ?? null,
    loadSeconds:
      downloadSeconds && compiling && together(manifest.target, downloadSeconds, compiling.seconds),
    basis: {
      download: speed?.basis ?? null,
      compile: compiling && (compiling.isMeasured ? "loads" : "estimate"),
    } as const,
    name: model.name,
    quantization,
    license,
  };
}

function together(target: BackendName, download: number, compiling: number): number {
  return target === "webgpu" ? Math.max(download, compiling) : download + compiling;
}
