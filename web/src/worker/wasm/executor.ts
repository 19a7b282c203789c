import type { FunctionName } from "../../artifact/manifest.js";
import type { BufferName } from "../../format/constants.js";
import { DeviceError, disposedError, namedMessage } from "../../protocol/errors.js";
import type { ModelBackend } from "../device/loaded.js";
import type { Plan, PlanArg } from "../device/plan.js";
import type { Plans } from "../device/remote-artifact.js";
import type { BackendShape, HostArray, Read } from "../engine/backend.js";
import { type Exports, errorOf } from "./instance.js";
import type { NamedRegion, Region } from "./layout.js";
import { type BoundPlan, launchAt } from "./tables.js";
import type { Threads } from "./threads.js";
import { turn } from "./turn.js";

/** One buffer of the paged cache: a layer's keys or values. */
export interface PageRegion {
  readonly group: number;
  readonly at: number;
  readonly pageBytes: number;
  readonly pages: number;
}

export interface WasmParts {
  readonly shape: BackendShape;
  readonly memory: WebAssembly.Memory;
  readonly exports: Exports;
  readonly pool: number;
  readonly threads: Threads;
  readonly named: ReadonlyMap<string, NamedRegion>;
  readonly cache: readonly PageRegion[];
  readonly plans: Plans;
  readonly bound: ReadonlyMap<Plan, BoundPlan>;
  readonly region: (arg: PlanArg) => Region;
}

/**
 * Replays plans in WebAssembly. Work is done before `run` returns, so all ordering promises hold by
 * themselves; during `fetch` the worker receives other messages.
 */
export class WasmExecutor implements ModelBackend {
  readonly shape: BackendShape;
  /** The host computes itself, so a step ahead of the reading would only delay the reading. */
  readonly pipelined = false;
  #parts: WasmParts | null;
  #failure: DeviceError | null = null;
  #launches = 0;
  readonly #plans: Plans;
  readonly kvMemory: number;

  constructor(parts: WasmParts) {
    this.#parts = parts;
    this.shape = parts.shape;
    this.#plans = parts.plans;
    this.kvMemory = parts.cache.reduce((sum, { pageBytes, pages }) => sum + pageBytes * pages, 0);
  }

  get launches(): number {
    return this.#launches;
  }

  launchesOf(name: FunctionName): number {
    const [smallest] = this.#plans[name].values();
    return smallest?.launches.length ?? 0;
  }

  /** The number of computing threads, and the bytes of the memory; both are 0 after `dispose`. */
  get held(): { readonly threads: number; readonly bytes: number } {
    const { threads, memory } = this.#parts ?? {};
    return { threads: threads?.count ?? 0, bytes: memory?.buffer.byteLength ?? 0 };
  }

  sizes(name: FunctionName): readonly number[] {
    return [...this.#plans[name].keys()];
  }

  /** Nothing is missing, because the build compiled every kernel. */
  missing(): number {
    return 0;
  }

  async prepare(): Promise<void> {
    if (this.#failure) throw this.#failure;
  }

  write(buffer: BufferName, data: HostArray, offset = 0): void {
    if (!this.#parts) return;
    const { at, bytes } = this.#named(buffer);
    const start = offset * data.BYTES_PER_ELEMENT;
    if (start + data.byteLength > bytes)
      throw new Error(`${data.byteLength} bytes at ${start} do not fit ${buffer}, which has ${bytes}`);
    const source = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    new Uint8Array(this.#parts.memory.buffer, at + start, data.byteLength).set(source);
  }

  run(name: FunctionName, size: number): void {
    const { launches } = this.#plan(name, size);
    this.#launches += launches.length;
    this.#replay(name, size, 0, launches.length);
  }

  /** The host's clock takes the times. On a page that is not isolated it has a resolution of 0.1 ms. */
  checkTimes(): void {}

  async profile(name: FunctionName, size: number): Promise<number[]> {
    const times = this.#plan(name, size).launches.map((_, i) => {
      const begin = performance.now();
      this.#replay(name, size, i, 1);
      return performance.now() - begin;
    });
    await this.#settle();
    return times;
  }

  launchesIn(name: FunctionName, size: number): { kernel: string; weightBytes: number }[] {
    return this.#plan(name, size).launches.map(({ kernel, args }) => {
      // A launch that looks tokens up does not read the whole table.
      const whole = args.some(({ space, name }) => space === "buffer" && name === "tokens") ? [] : args;
      const weights = whole.filter(({ space }) => space === "weight");
      const bytes = weights.map((arg) => this.#parts?.region(arg).bytes ?? 0);
      return { kernel, weightBytes: bytes.reduce((sum, count) => sum + count, 0) };
    });
  }

  copyPage(group: number, from: number, to: number): void {
    if (!this.#parts) return;
    const bytes = new Uint8Array(this.#parts.memory.buffer);
    for (const { at, pageBytes } of this.#parts.cache.filter((store) => store.group === group))
      bytes.copyWithin(at + to * pageBytes, at + from * pageBytes, at + (from + 1) * pageBytes);
  }

  async fetch(reads: readonly Read[]): Promise<HostArray[]> {
    const copies = this.#failure ? [] : reads.map((read) => this.#copy(read));
    await this.#settle();
    return copies;
  }

  dispose(): void {
    this.#failure ??= disposedError();
    const parts = this.#parts;
    this.#parts = null;
    // A thread that waits in the module ends with its worker.
    parts?.threads.end();
  }

  /** Lets other events of the loop run, and then throws if a launch has failed. */
  async #settle(): Promise<void> {
    await turn();
    if (this.#failure) throw this.#failure;
  }

  /** Runs `count` launches of a plan from number `first` on. After a failure, nothing runs any more. */
  #replay(name: FunctionName, size: number, first: number, count: number): void {
    const plan = this.#plan(name, size);
    const bound = this.#parts?.bound.get(plan);
    if (!this.#parts || !bound || this.#failure) return;
    const { exports, memory, pool, threads } = this.#parts;
    try {
      const failed = exports.nf_replay(pool, launchAt(bound, first), count);
      if (failed < 0) return;
      const kernel = plan.launches[first + failed]?.kernel;
      const reason = errorOf(exports, memory) || (threads.failure ?? "one of its threads trapped");
      this.#failure = new DeviceError(`The kernel ${kernel} of ${name}.${size} failed: ${reason}. ${AGAIN}`);
    } catch (cause) {
      // The module trapped. If a thread trapped, the replay has returned above. The engine's own error is not
      // passed on as the cause, because its stack holds the instance, whose memory must be freed before a new
      // one is allocated.
      this.#failure = new DeviceError(
        `A kernel of ${name}.${size} trapped (${namedMessage(cause)}). ${AGAIN}`,
      );
    }
  }

  #copy({ buffer, count }: Read): HostArray {
    const { at, dtype } = this.#named(buffer);
    const data = this.#parts?.memory.buffer ?? new ArrayBuffer(0);
    // `slice` copies the values, also out of shared memory.
    switch (dtype) {
      case "int32":
        return new Int32Array(data, at, count).slice();
      case "uint32":
        return new Uint32Array(data, at, count).slice();
      case "float32":
        return new Float32Array(data, at, count).slice();
      default:
        throw new Error(`buffers of ${dtype} stay on the device`);
    }
  }

  #plan(name: FunctionName, size: number): Plan {
    const plan = this.#plans[name].get(size);
    if (!plan) throw new Error(`the artifact has no plan ${name}.${size}`);
    return plan;
  }

  #named(name: string): NamedRegion {
    const found = this.#parts?.named.get(name);
    if (!found) throw new Error(`the artifact has no buffer ${name}`);
    return found;
  }
}

const AGAIN =
  "Ask again: the model is loaded again, into a fresh instance. If this happens again, the artifact is " +
  "damaged: download or build it again.";
