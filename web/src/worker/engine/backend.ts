import type { FunctionName } from "../../artifact/manifest.js";
import type { BufferName } from "../../format/constants.js";

export type HostArray = Int32Array | Uint32Array | Float32Array;

/** Part of a device buffer to read back: `count` elements from its start. */
export interface Read {
  readonly buffer: BufferName;
  readonly count: number;
}

/** Caches whose layers attend to as many positions (null: to all), and the pages that each of them has. */
export interface GroupShape {
  readonly window: number | null;
  /** Positions of a column of states; absent or null: a column is a page of positions. */
  readonly stride?: number | null;
  readonly pages: number;
}

/** What the runtime chose at load, and what the model states. */
export interface BackendShape {
  readonly groups: readonly GroupShape[];
  readonly pageSize: number;
  readonly slots: number;
  /** Width of each group's page table. */
  readonly pagesPerSlot: number;
  /** Tokens a sequence can have: bounded by the model, the memory and the caller. */
  readonly contextLength: number;
  readonly vocabSize: number;
  /** Values of the embeddings that a step gives; absent where it gives logits. */
  readonly embedding?: number | undefined;
}

/**
 * A device that runs one artifact. The engine talks to nothing else, so tests replace it by a model in plain
 * code.
 *
 * Ordering: `write`, `run`, `copyPage` and `fetch` take effect on the device in the order of the calls,
 * although the calls return at once. A fetch therefore sees every run before it and none after it. Ownership:
 * `write` copies its data before it returns; arrays from `fetch` belong to the caller.
 */
export interface Backend {
  readonly shape: BackendShape;
  /** False where it works only while it is called, so that nothing is gained by steps ahead of the reading. */
  readonly pipelined?: boolean;
  /** The sizes of a function, ascending. */
  sizes(name: FunctionName): readonly number[];
  /** Kernels that are yet to be compiled before `run` may be called. */
  missing(name: FunctionName, size: number): number;
  /**
   * Has them compiled; `onKernel` hears of each. Rejects with DeviceError where the device cannot run one,
   * with OutOfMemoryError where it has no memory for it; the device stays as it is. With DeviceLostError when
   * the device is lost.
   */
  prepare(name: FunctionName, size: number, onKernel?: () => void): Promise<void>;
  /** Overwrites a buffer from element `offset` on. */
  write(buffer: BufferName, data: HostArray, offset?: number): void;
  run(name: FunctionName, size: number): void;
  /** Copies one page of every cache of a group. */
  copyPage(group: number, from: number, to: number): void;
  /**
   * Reads device buffers, in the dtype they have. Rejects with DeviceLostError when the device is lost, with
   * OutOfMemoryError when it had no memory for what was asked of it since.
   */
  fetch(reads: readonly Read[]): Promise<HostArray[]>;
  /** Frees everything; pending fetches reject. */
  dispose(): void;
}
