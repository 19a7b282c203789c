import { DeviceError } from "../../protocol/errors.js";
import { isFirefox } from "../host.js";
import type { BufferRegistry } from "./buffers.js";

/** Between two looks at whether work is done. */
const POLL_MS = 1;

/** Resolves once the first `bytes` bytes of `buffer` can be read. */
export function mapped(device: GPUDevice, buffer: GPUBuffer, bytes: number): Promise<void> {
  return hurried(device, buffer.mapAsync(GPUMapMode.READ, 0, bytes));
}

/** Resolves once the device has done all that it was given. */
export function finished(device: GPUDevice): Promise<void> {
  return hurried(device, device.queue.onSubmittedWorkDone());
}

/**
 * Firefox looks whether work is done whenever work is submitted, else from a timer of 100 ms
 * (https://bugzilla.mozilla.org/show_bug.cgi?id=1870699): 10 tokens a second, whatever the GPU. So commands that
 * do nothing are submitted until it is.
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
