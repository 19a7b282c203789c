import type { Dtype, Manifest, Program } from "../../artifact/manifest.js";
import { WASM_RESERVED, WASM_STACK } from "../../format/constants.js";
import { DeviceError, OutOfMemoryError } from "../../protocol/errors.js";
import { bufferBytes, type Extents, storedAs } from "../device/memory.js";

/** Where everything lies in a WebAssembly memory (docs/wasm.md). */

export const WASM_PAGE = 64 * 2 ** 10;
/** 4 GiB less a page, so that the size too is a number of 32 bits. */
export const MOST_BYTES = 65_535 * WASM_PAGE;

export interface Region {
  readonly at: number;
  readonly bytes: number;
}

export interface NamedRegion extends Region {
  readonly dtype: Dtype;
}

export interface Layout {
  /** Where the weight stream begins. */
  readonly weights: number;
  readonly named: ReadonlyMap<string, NamedRegion>;
  readonly workspace: readonly Region[];
  readonly tables: number;
  /** The end of each further thread's stack, which grows downwards. */
  readonly stacks: readonly number[];
  /** Bytes of the whole memory, in whole pages of WASM_PAGE bytes. */
  readonly bytes: number;
}

/** Gives out memory from the bottom up; nothing is given back. */
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

/** `threads`: the first one included. */
export function layOut(
  manifest: Manifest,
  program: Program,
  extents: Extents,
  tables: number,
  threads: number,
): Layout {
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

/** A memory of just that size, zeroed. DeviceError where it cannot be had. */
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
