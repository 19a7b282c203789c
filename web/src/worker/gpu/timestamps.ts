import { DeviceError } from "../../both/errors.js";

/** The feature by which a compute pass tells when it begins and ends. */
export const TIMESTAMPS = "timestamp-query";

const BYTES = 8;

/** Stamps around passes of one device, read once. */
export class Timestamps {
  readonly #set: GPUQuerySet;
  readonly #resolved: GPUBuffer;
  readonly #readable: GPUBuffer;

  /** For so many passes. */
  constructor(
    device: GPUDevice,
    private readonly passes: number,
  ) {
    if (!device.features.has(TIMESTAMPS))
      throw new DeviceError(
        "This browser does not tell what a launch takes on this GPU (it lacks timestamp-query). Chrome does, from " +
          "121 on; or measure with `nearfar bench kernels`.",
      );
    const size = 2 * passes * BYTES;
    this.#set = device.createQuerySet({ type: "timestamp", count: 2 * passes });
    const { QUERY_RESOLVE, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
    this.#resolved = device.createBuffer({ size, usage: QUERY_RESOLVE | COPY_SRC });
    this.#readable = device.createBuffer({ size, usage: COPY_DST | MAP_READ });
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

  /** After the last pass. */
  end(encoder: GPUCommandEncoder): void {
    encoder.resolveQuerySet(this.#set, 0, 2 * this.passes, this.#resolved, 0);
    encoder.copyBufferToBuffer(this.#resolved, 0, this.#readable, 0, this.#readable.size);
  }

  /** Milliseconds of each pass. Where the clock went back, as it may while a GPU changes its own, 0. */
  async milliseconds(): Promise<number[]> {
    await this.#readable.mapAsync(GPUMapMode.READ);
    const stamps = new BigUint64Array(this.#readable.getMappedRange().slice(0));
    return Array.from({ length: this.passes }, (_, pass) => {
      const passed = Number((stamps[2 * pass + 1] ?? 0n) - (stamps[2 * pass] ?? 0n));
      return Math.max(passed, 0) / 1e6;
    });
  }

  free(): void {
    this.#set.destroy();
    this.#resolved.destroy();
    this.#readable.destroy();
  }
}
