import type { FunctionName } from "../../src/artifact/manifest.js";
import type { BufferName } from "../../src/format/constants.js";
import type { Backend, BackendShape, HostArray, Read } from "../../src/worker/engine/backend.js";

/**
 * How a call of the device goes wrong: it throws instead of its work, after its work, or it leaves its work
 * out unnoticed until the next results are read, as WebGPU's errors do.
 */
export const FAULTS = ["before", "after", "unnoticed"] as const;
export type Fault = (typeof FAULTS)[number];

/** A backend whose call number `at` (from 0, over all calls that reach the device) fails, once. */
export class FaultyBackend implements Backend {
  calls = 0;
  /** The failed call; null before the failure. */
  failed: string | null = null;
  #unnoticed: Error | null = null;

  constructor(
    private readonly inner: Backend,
    private readonly at: number,
    private readonly fault: Fault,
  ) {}

  get shape(): BackendShape {
    return this.inner.shape;
  }

  sizes(name: FunctionName): readonly number[] {
    return this.inner.sizes(name);
  }

  missing(name: FunctionName, size: number): number {
    return this.inner.missing(name, size);
  }

  async prepare(name: FunctionName, size: number, onKernel?: () => void): Promise<void> {
    const fail = this.#next(`prepare ${name}.${size}`);
    if (fail && this.fault !== "after") throw fail;
    await this.inner.prepare(name, size, onKernel);
    if (fail) throw fail;
  }

  write(buffer: BufferName, data: HostArray, offset?: number): void {
    this.#call(`write ${buffer}`, () => this.inner.write(buffer, data, offset));
  }

  run(name: FunctionName, size: number): void {
    this.#call(`run ${name}.${size}`, () => this.inner.run(name, size));
  }

  copyPage(group: number, from: number, to: number): void {
    this.#call(`copyPage ${group} ${from} ${to}`, () => this.inner.copyPage(group, from, to));
  }

  async fetch(reads: readonly Read[]): Promise<HostArray[]> {
    const fail = this.#next("fetch") ?? this.#unnoticed;
    this.#unnoticed = null;
    const results = await this.inner.fetch(reads);
    if (fail) throw fail;
    return results;
  }

  dispose(): void {
    this.inner.dispose();
  }

  #call(what: string, work: () => void): void {
    const fail = this.#next(what);
    if (fail && this.fault === "unnoticed") {
      this.#unnoticed = fail;
      return;
    }
    if (fail && this.fault === "before") throw fail;
    work();
    if (fail) throw fail;
  }

  #next(what: string): Error | null {
    if (this.calls++ !== this.at) return null;
    this.failed = what;
    // The error is a driver's, not one of our classes.
    return new Error(`${what} failed`);
  }
}
