import { DeviceError } from "../../both/errors.js";
import type { BufferRegistry } from "./buffers.js";

/** Buffers that results are copied into and mapped from; each is used again once the host has read it. */
export class StagingRing {
  readonly #free: GPUBuffer[] = [];

  constructor(private readonly buffers: BufferRegistry) {}

  /** A free buffer of at least `bytes` bytes. Sizes are powers of two, so that few different ones live. */
  acquire(bytes: number): GPUBuffer {
    const found = this.#free.findIndex((buffer) => buffer.size >= bytes);
    const [reused] = found < 0 ? [] : this.#free.splice(found, 1);
    if (reused) return reused;
    const size = 2 ** Math.ceil(Math.log2(Math.max(bytes, 256)));
    return this.buffers.create("staging", size, GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST);
  }

  /**
   * Waits for the copies into `buffer`, hands its first `bytes` bytes to `read`, and takes the buffer back.
   */
  async read<T>(buffer: GPUBuffer, bytes: number, read: (data: ArrayBuffer) => T): Promise<T> {
    try {
      await buffer.mapAsync(GPUMapMode.READ, 0, bytes);
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new DeviceError(`The GPU gave no results: ${reason}`, { cause });
    }
    const result = read(buffer.getMappedRange(0, bytes));
    buffer.unmap();
    this.#free.push(buffer);
    return result;
  }
}
