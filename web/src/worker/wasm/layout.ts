import type { Dtype, Manifest, Program } from "../../artifact/manifest.js";
import { WASM_RESERVED, WASM_STACK } from "../../format/constants.js";
import { DeviceError, OutOfMemoryError } from "../../protocol/errors.js";
import { bufferBytes, type Extents, storedAs } from "../device/memory.js";

/** Addresses of everything in a WebAssembly memory (docs/wasm.md). */

export const WASM_PAGE = 64 * 2 ** 10;
/** 4 GiB less a page, so that the size fits in 32 bits too. */
export const MOST_BYTES = 65_535 * WASM_PAGE;

export interface Region {
  readonly at: number;
  readonly bytes: number;
}

export interface NamedRegion extends Region {
  readonly dtype: Dtype;
}

export interface MemoryLayout {
  /** The address of the weight stream. */
  readonly weights: number;
  readonly named: ReadonlyMap<string, NamedRegion>;
  readonly workspace: readonly Region[];
  readonly tables: number;
  /** The end of each further thread's stack, which grows downwards. */
  readonly stacks: readonly number[];
  /** Bytes of the whole memory, in whole pages of WASM_PAGE bytes. */
  readonly bytes: number;
}

/** Allocates memory from the bottom up; nothing is freed. */
class Bump {
  #end = WASM_RESERVED;

  take(bytes: number, align: number): number {
    const at = Math.ceil(this.#end / align) * align;
    this.#end = at + bytes;
    return at;
  }

  get end(): number {
    return this.#end;
  }
}

/** Lays out a memory. `threads` counts the first thread too. */
export function layOut(
  manifest: Manifest,
  program: Program,
  extents: Extents,
  tables: number,
  threads: number,
): MemoryLayout {
  const bump = new Bump();
  const weights = bump.take(manifest.weights.bytes, 256);
  const named = manifest.buffers.map((entry): [string, NamedRegion] => {
    const bytes = bufferBytes(entry, program, extents);
    const { dtype } = storedAs(entry, program);
    return [entry.name, { at: bump.take(bytes, 64), bytes, dtype }];
  });
  const workspace = program.workspace.map((bytes) => ({ at: bump.take(bytes, 64), bytes }));
  const at = bump.take(tables, 8);
  const stacks = Array.from({ length: threads - 1 }, () => bump.take(WASM_STACK, 64) + WASM_STACK);
  const bytes = Math.ceil(bump.end / WASM_PAGE) * WASM_PAGE;
  return { weights, named: new Map(named), workspace, tables: at, stacks, bytes };
}

/** Makes a memory of exactly `bytes` bytes, filled with zeros. Throws DeviceError if the browser has none. */
export function makeMemory(bytes: number, shared: boolean): WebAssembly.Memory {
  if (bytes > MOST_BYTES)
    throw new DeviceError(
      `The model needs ${bytes} bytes of WebAssembly memory; there are ${MOST_BYTES} at most.`,
      { code: "out-of-memory" },
    );
  const pages = bytes / WASM_PAGE;
  try {
    return new WebAssembly.Memory({ initial: pages, maximum: pages, shared });
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new OutOfMemoryError(`There is no WebAssembly memory of ${bytes} bytes: ${reason}.`, { cause });
  }
}
