import { DeviceError } from "../../protocol/errors.js";

/**
 * Makes, counts and frees every GPU buffer of an engine. A part holds the buffers of one executor, when
 * several executors share the same weights.
 */
export class BufferRegistry {
  readonly #live = new Map<GPUBuffer, number>();
  #bytes = 0;

  constructor(
    readonly device: GPUDevice,
    private readonly whole: BufferRegistry | null = null,
  ) {}

  /** A registry of some of these buffers, which can be freed on their own. */
  part(): BufferRegistry {
    return new BufferRegistry(this.device, this.#all);
  }

  /** The number of buffers that are not freed; for a part, the number of the whole registry. */
  get count(): number {
    return this.#all.#live.size;
  }

  get bytes(): number {
    return this.#all.#bytes;
  }

  /** Makes a buffer of at least `bytes` bytes, filled with zeros. Bindings and copies need multiples of 4. */
  create(label: string, bytes: number, usage: GPUBufferUsageFlags): GPUBuffer {
    const size = Math.max(Math.ceil(bytes / 4) * 4, 16);
    const limit = this.device.limits.maxBufferSize;
    if (size > limit)
      throw new DeviceError(`The buffer ${label} needs ${size} bytes; this GPU allows ${limit} a buffer.`, {
        code: "device-unsuitable",
      });
    const buffer = this.device.createBuffer({ label, size, usage });
    for (const registry of this.#both) {
      registry.#live.set(buffer, size);
      registry.#bytes += size;
    }
    return buffer;
  }

  free(buffer: GPUBuffer): void {
    const size = this.#live.get(buffer);
    if (size === undefined) return;
    for (const registry of this.#both) {
      registry.#live.delete(buffer);
      registry.#bytes -= size;
    }
    buffer.destroy();
  }

  freeAll(): void {
    for (const buffer of [...this.#live.keys()]) this.free(buffer);
  }

  /** Frees all buffers and destroys the device. */
  close(): void {
    this.#all.freeAll();
    this.device.destroy();
  }

  /**
   * Runs `allocate` and waits for the device's verdict. If memory ran out, frees the buffers of `allocate`
   * and throws a DeviceError that starts with `what` and its size.
   */
  async guarded<T>(what: string, advice: string, allocate: () => T): Promise<T> {
    const before = new Set(this.#live.keys());
    const held = this.bytes;
    this.device.pushErrorScope("out-of-memory");
    this.device.pushErrorScope("validation");
    const made = settle(allocate);
    const asked = this.bytes - held;
    // Both scopes are popped in this turn, so that they do not catch errors of other code.
    const popped = [this.device.popErrorScope(), this.device.popErrorScope()] as const;
    const [invalid, exhausted] = await Promise.all(popped);
    if (made.ok && !invalid && !exhausted) return made.value;
    for (const buffer of [...this.#live.keys()]) if (!before.has(buffer)) this.free(buffer);
    if (!made.ok) throw made.error;
    throw new DeviceError(
      `The GPU has no room for ${what} (${asked} bytes, beside ${held} bytes already in use): ` +
        `${(invalid ?? exhausted)?.message}. ${advice}`,
      { code: "out-of-memory" },
    );
  }

  get #all(): BufferRegistry {
    return this.whole ?? this;
  }

  get #both(): readonly BufferRegistry[] {
    return this.whole ? [this, this.whole] : [this];
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
