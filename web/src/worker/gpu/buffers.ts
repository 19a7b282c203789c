import { DeviceError } from "../../both/errors.js";

/** Every GPU buffer of an engine: made here, counted here, freed here. */
export class BufferRegistry {
  readonly #live = new Map<GPUBuffer, number>();
  #bytes = 0;

  constructor(readonly device: GPUDevice) {}

  /** Buffers not yet freed. */
  get count(): number {
    return this.#live.size;
  }

  get bytes(): number {
    return this.#bytes;
  }

  /** Makes a buffer of at least `bytes` bytes, filled with zeros. Bindings and copies need multiples of 4. */
  create(label: string, bytes: number, usage: GPUBufferUsageFlags): GPUBuffer {
    const size = Math.max(Math.ceil(bytes / 4) * 4, 16);
    const limit = this.device.limits.maxBufferSize;
    if (size > limit)
      throw new DeviceError(`The buffer ${label} needs ${size} bytes; this GPU allows ${limit} a buffer.`);
    const buffer = this.device.createBuffer({ label, size, usage });
    this.#live.set(buffer, size);
    this.#bytes += size;
    return buffer;
  }

  free(buffer: GPUBuffer): void {
    const size = this.#live.get(buffer);
    if (size === undefined) return;
    this.#live.delete(buffer);
    this.#bytes -= size;
    buffer.destroy();
  }

  freeAll(): void {
    for (const buffer of [...this.#live.keys()]) this.free(buffer);
  }

  /**
   * Runs `allocate` and waits for the device's verdict. When memory runs out, frees what `allocate` made and
   * throws a DeviceError that starts with `what` and its size.
   */
  async guarded<T>(what: string, advice: string, allocate: () => T): Promise<T> {
    const before = new Set(this.#live.keys());
    const held = this.#bytes;
    this.device.pushErrorScope("out-of-memory");
    this.device.pushErrorScope("validation");
    const made = settle(allocate);
    const asked = this.#bytes - held;
    const invalid = await this.device.popErrorScope();
    const exhausted = await this.device.popErrorScope();
    if (made.ok && !invalid && !exhausted) return made.value;
    for (const buffer of [...this.#live.keys()]) if (!before.has(buffer)) this.free(buffer);
    if (!made.ok) throw made.error;
    throw new DeviceError(
      `The GPU has no room for ${what} (${asked} bytes, beside ${held} bytes already in use): ` +
        `${(invalid ?? exhausted)?.message}. ${advice}`,
    );
  }
}

type Settled<T> = { readonly ok: true; readonly value: T } | { readonly ok: false; readonly error: unknown };

function settle<T>(action: () => T): Settled<T> {
  try {
    return { ok: true, value: action() };
  } catch (error) {
    return { ok: false, error };
  }
}
