import { DeviceError } from "../../protocol/errors.js";
import type { BufferRegistry } from "./buffers.js";

/** The feature by which a compute pass tells when it begins and ends. */
export const TIMESTAMPS = "timestamp-query";

const BYTES = 8;

/** DeviceError where passes do not tell. */
export function checkTimestamps(device: GPUDevice): void {
  if (!device.features.has(TIMESTAMPS))
    throw new DeviceError(
      "This browser does not tell what a launch takes on this GPU (it lacks timestamp-query). Chrome does, " +
        "from 121 on; or measure with `nearfar bench kernels`.",
      { code: "device-unsuitable" },
    );
}

/** Stamps around passes of a device that tells them, read once. */
export class Timestamps {
  readonly #set: GPUQuerySet;
  readonly #resolved: GPUBuffer;

  /** For so many passes. */
  constructor(
    private readonly buffers: BufferRegistry,
    private readonly passes: number,
  ) {
    this.#set = buffers.device.createQuerySet({ type: "timestamp", count: 2 * passes });
    const usage = GPUBufferUsage.QUERY_RESOLVE | GPUBufferUsage.COPY_SRC;
    this.#resolved = buffers.create("timestamps", this.bytes, usage);
  }

  /** Bytes of all stamps. */
  get bytes(): number {
    return 2 * this.passes * BYTES;
  }

  /** What pass number `pass` is begun with. */
  around(pass: number): GPUComputePassTimestampWrites {
    const beginningOfPassWriteIndex = 2 * pass;
    return {
      querySet: this.#set,
      beginningOfPassWriteIndex,
      endOfPassWriteIndex: beginningOfPassWriteIndex + 1,
    };
  }

  /** After the last pass: the stamps go to `readable`. */
  end(encoder: GPUCommandEncoder, readable: GPUBuffer): void {
    encoder.resolveQuerySet(this.#set, 0, 2 * this.passes, this.#resolved, 0);
    encoder.copyBufferToBuffer(this.#resolved, 0, readable, 0, this.bytes);
  }

  /** Milliseconds of each pass, from what was read. Where a GPU's clock went back, as it may, 0. */
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
