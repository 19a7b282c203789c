import { DeviceError } from "../../protocol/errors.js";
import type { BufferRegistry } from "./buffers.js";

/** The feature by which compute passes can be timed. */
export const TIMESTAMPS = "timestamp-query";

const BYTES = 8;

/** Throws DeviceError if the device cannot time passes. */
export function checkTimestamps(device: GPUDevice): void {
  if (!device.features.has(TIMESTAMPS))
    throw new DeviceError(
      "This browser cannot time launches on this GPU (it lacks timestamp-query). Chrome can, from 121 on; " +
        "or measure with `nearfar bench kernels`.",
      { code: "device-unsuitable" },
    );
}

/** Timestamps around compute passes, which are read once. */
export class Timestamps {
  readonly #set: GPUQuerySet;
  readonly #resolved: GPUBuffer;

  /** `passes` is the number of passes to time. */
  constructor(
    private readonly buffers: BufferRegistry,
    private readonly passes: number,
  ) {
    this.#set = buffers.device.createQuerySet({ type: "timestamp", count: 2 * passes });
    const usage = GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC;
    this.#resolved = buffers.create("timestamps", this.bytes, usage);
  }

  /** Bytes of all timestamps. */
  get bytes(): number {
    return 2 * this.passes * BYTES;
  }

  /** The descriptor with which pass number `pass` begins. */
  around(pass: number): GPUComputePassTimestampWrites {
    const beginningOfPassWriteIndex = 2 * pass;
    return {
      querySet: this.#set,
      beginningOfPassWriteIndex,
      endOfPassWriteIndex: beginningOfPassWriteIndex + 1,
    };
  }

  /** Copies the timestamps to `readable`, after the last pass. */
  end(encoder: GPUCommandEncoder, readable: GPUBuffer): void {
    encoder.resolveQuerySet(this.#set, 0, 2 * this.passes, this.#resolved, 0);
    encoder.copyBufferToBuffer(this.#resolved, 0, readable, 0, this.bytes);
  }

  /** Milliseconds of each pass; 0 if a GPU's clock went back, which can happen. */
  milliseconds(data: ArrayBuffer): number[] {
    const stamps = new BigUint64Array(data);
    return Array.from({ length: this.passes }, (_, pass) => {
      const passed = Number((stamps[2 * pass + 1] ?? 0n) - (stamps[2 * pass] ?? 0n));
      return Math.max(passed, 0) / 1e6;
    });
  }

  free(): void {
    this.#set.destroy();
    this.buffers.free(this.#resolved);
  }
}
