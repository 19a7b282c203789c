import { DeviceError, DeviceLostError, OutOfMemoryError } from "../../protocol/errors.js";
import type { BufferRegistry } from "./buffers.js";

/**
 * Reports a device's faults to the executors in use: one listener for the device's whole life, while
 * executors come and go.
 */
export class Faults {
  readonly #listeners = new Set<(error: DeviceError) => void>();
  #lost: DeviceLostError | null = null;

  constructor(buffers: BufferRegistry) {
    const { device } = buffers;
    void device.lost.then(({ reason, message }) => {
      const why = "The driver reset it, after a fault or because a step took too long, or took it away.";
      this.#lost = new DeviceLostError(`The GPU device was lost (${reason}: ${message}). ${why}`);
      this.#tell(this.#lost);
      this.#listeners.clear();
    });
    device.addEventListener("uncapturederror", ({ error }) => {
      const held = `${buffers.bytes} bytes in ${buffers.count} buffers are in use`;
      this.#tell(
        error instanceof GPUOutOfMemoryError
          ? new OutOfMemoryError(`The GPU ran out of memory (${held}): ${error.message}`)
          : new DeviceError(`The GPU reports an error (${held}): ${error.message}`),
      );
    });
  }

  /** The loss of the device; null while it works. */
  get lost(): DeviceLostError | null {
    return this.#lost;
  }

  /** Number of listeners. */
  get listeners(): number {
    return this.#listeners.size;
  }

  /**
   * Calls `listener` for every later fault, and at once if the device is already lost. Returns the
   * unsubscribe function.
   */
  listen(listener: (error: DeviceError) => void): () => void {
    if (this.#lost) listener(this.#lost);
    else this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #tell(error: DeviceError): void {
    for (const listener of this.#listeners) listener(error);
  }
}
