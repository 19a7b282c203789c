import type { FunctionName } from "../../artifact/manifest.js";
import type { BufferName } from "../../format/constants.js";

export type HostArray = Int32Array | Uint32Array | Float32Array;

/** A part of a device buffer to read back: `count` elements from its start. */
export interface Read {
  readonly buffer: BufferName;
  readonly count: number;
}

/**
 * Caches whose layers attend to the same number of positions (null: all), and the number of pages that each
 * cache has.
 */
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
  /** The width of each group's page table. */
  readonly pagesPerSlot: number;
  /** The most tokens of a sequence, as the model, the memory and the caller allow. */
  readonly contextLength: number;
  readonly vocabSize: number;
  /** The number of values of an embedding; absent if a step gives logits. */
  readonly embedding?: number | undefined;
}

/**
 * A device that runs one artifact. The engine talks to nothing else, so tests replace the device by a model
 * in plain code.
 *
 * Ordering: `write`, `run`, `copyPage` and `fetch` take effect on the device in the order of the calls,
 * although the calls return at once. A fetch therefore sees every run before it and none after it. Ownership:
 * `write` copies its data before it returns; arrays from `fetch` belong to the caller.
 */
export interface Backend {
  readonly shape: BackendShape;
  /**
   * False for a device that works only while it is called, so that steps ahead of the reading gain nothing.
   */
  readonly pipelined?: boolean;
  /** The sizes of a function, ascending. */
  sizes(name: FunctionName): readonly number[];
  /** The number of kernels that have to be compiled before `run` may be called. */
  missing(name: FunctionName, size: number): number;
  /**
   * Compiles the kernels; calls `onKernel` after each. Rejects with DeviceError if the device cannot run a
   * kernel, and with OutOfMemoryError if it has no memory for one; the device stays usable after both.
   * Rejects with DeviceLostError if the device is lost.
   */
  prepare(name: FunctionName, size: number, onKernel?: () => void): Promise<void>;
  /** Overwrites a buffer from element `offset` on. */
  write(buffer: BufferName, data: HostArray, offset?: number): void;
  run(name: FunctionName, size: number): void;
  /** Copies one page of every cache of a group. */
  copyPage(group: number, from: number, to: number): void;
  /**
   * Reads device buffers, in the dtype that they have. Rejects with DeviceLostError if the device is lost,
   * and with OutOfMemoryError if it had no memory for the work that it got since the last fetch.
   */
  fetch(reads: readonly Read[]): Promise<HostArray[]>;
  /** Frees everything; pending fetches reject. */
  dispose(): void;
}
