/** Predicts the time of a first load, from earlier measurements or, without one, from known figures. */

import type { Manifest, Program } from "../artifact/manifest.js";
import type { DeviceClass } from "../protocol/backends.js";
import { compilingOn, measured, speedOf } from "../storage/measures.js";

/** Bytes per second, and the source of the figure. */
export interface Speed {
  readonly bytesPerSecond: number;
  readonly basis: "loads" | "manifest" | "connection";
}

/**
 * Least bytes of a measurement: a shorter response fits in the first few packets and does not show the speed.
 */
const LEAST_BYTES = 16_384;

/**
 * The speed of earlier loads from that origin. Otherwise the larger of two figures that are both too low: the
 * speed of the manifest's download, and the browser's report of its connection
 * (https://wicg.github.io/netinfo/: megabits a second, 10 at most). Null if there is neither.
 */
export function speedFrom(url: URL): Speed | null {
  const kept = measured(speedOf(url));
  if (kept !== null) return { bytesPerSecond: kept, basis: "loads" };
  const { connection } = (globalThis.navigator ?? {}) as { readonly connection?: { downlink?: number } };
  const told = (connection?.downlink ?? 0) * 125_000;
  const seen = speedOfFetch(url);
  if (told === 0 && seen === 0) return null;
  return told >= seen
    ? { bytesPerSecond: told, basis: "connection" }
    : { bytesPerSecond: seen, basis: "manifest" };
}

/**
 * Bytes per second of the last fetch of `url`; 0 if it came from a cache, or from another origin that hides
 * its timing.
 */
function speedOfFetch(url: URL): number {
  const last = performance.getEntriesByName(url.href, "resource").at(-1);
  const { transferSize = 0, requestStart, responseEnd } = (last ?? {}) as PerformanceResourceTiming;
  return transferSize < LEAST_BYTES ? 0 : (1000 * transferSize) / (responseEnd - requestStart);
}

export interface Compiling {
  readonly seconds: number;
  readonly isMeasured: boolean;
}

/**
 * Seconds for a kernel if none were measured. A GPU compiles the 57 kernels of a small model in a second or
 * two, SwiftShader in two minutes.
 */
const GUESSED = { gpu: 1.5 / 57, software: 120 / 57 };

/** The kernels that a load waits for: all on a GPU, those of the smallest step on a software GPU. */
export function compilingOf({ kernels, functions }: Program, { name, deviceClass }: Named): Compiling {
  const software = deviceClass === "software";
  const sizes = Math.max(1, ...Object.values(functions).map(({ length }) => length));
  const kept = measured(compilingOn(name));
  const each = kept ?? (software ? GUESSED.software : GUESSED.gpu);
  return {
    seconds: each * (software ? Math.ceil(kernels.size / sizes) : kernels.size),
    isMeasured: kept !== null,
  };
}

interface Named {
  readonly name: string;
  readonly deviceClass: DeviceClass;
}

/**
 * Bytes of WebAssembly compiled per second: browsers' first compilers reach tens of megabytes, phones less.
 */
const WASM_SPEED = 10e6;

/**
 * The predicted compilation of a library, by the size of its bundle file; null in an artifact without bundle
 * files.
 */
export function compilingOfLibrary({ name }: Program, packs: Manifest["packs"]): Compiling | null {
  const pack = packs.find(({ program }) => program === name);
  return pack ? { seconds: pack.bytes / WASM_SPEED, isMeasured: false } : null;
}
