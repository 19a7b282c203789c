import { DeviceError, DeviceLostError, OutOfMemoryError } from "../../protocol/errors.js";
import type { BufferRegistry } from "./buffers.js";

/**
 * What a device says of itself at any time, to the executors that are in use: one ear for the device's whole
 * life, while executors come and go over it.
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

  /** Null while the device is there. */
  get lost(): DeviceLostError | null {
    return this.#lost;
  }

  /** How many listen. */
  get listeners(): number {
    return this.#listeners.size;
  }

  /** Tells of all faults from now on, and of a loss of before; returns what ends that. */
  listen(listener: (error: DeviceError) => void): () => void {
    if (this.#lost) listener(this.#lost);
    else this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #tell(error: DeviceError): void {
    for (const listener of this.#listeners) listener(error);
  }
}
