import { DeviceError } from "../../protocol/errors.js";
import { isFirefox } from "../host.js";
import type { BufferRegistry } from "./buffers.js";

/** The time between two checks whether work is done. */
const POLL_MS = 1;

/** Resolves once the first `bytes` bytes of `buffer` can be read. */
export function mapped(device: GPUDevice, buffer: GPUBuffer, bytes: number): Promise<void> {
  return hurried(device, buffer.mapAsync(GPUMapMode.READ, 0, bytes));
}

/** Resolves once the device has done all its work so far. */
export function finished(device: GPUDevice): Promise<void> {
  return hurried(device, device.queue.onSubmittedWorkDone());
}

/**
 * Firefox checks whether work is done only when work is submitted, or every 100 ms
 * (https://bugzilla.mozilla.org/show_bug.cgi?id=1870699), which would limit every GPU to 10 tokens a second.
 * So empty commands are submitted until the work is done.
 */
async function hurried<T>(device: GPUDevice, done: Promise<T>): Promise<T> {
  if (!isFirefox()) return done;
  const look = (): void => device.queue.submit([device.createCommandEncoder().finish()]);
  const timer = setInterval(look, POLL_MS);
  try {
    look();
    return await done;
  } finally {
    clearInterval(timer);
  }
}

/**
 * Buffers for results: results are copied into a buffer and mapped from it. A buffer is used again once the
 * host has read it.
 */
export class StagingRing {
  readonly #free: GPUBuffer[] = [];

  constructor(private readonly buffers: BufferRegistry) {}

  /** A free buffer of at least `bytes` bytes. Sizes are powers of two, so that few different sizes exist. */
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
      await mapped(this.buffers.device, buffer, bytes);
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
