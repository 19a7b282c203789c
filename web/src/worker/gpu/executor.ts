import type { Dtype, FunctionName } from "../../artifact/manifest.js";
import type { BufferName } from "../../format/constants.js";
import { DeviceError, disposedError } from "../../protocol/errors.js";
import type { Plan, PlanArg } from "../device/plan.js";
import type { Backend, BackendShape, HostArray, Read } from "../engine/backend.js";
import type { BufferRegistry } from "./buffers.js";
import type { Faults } from "./faults.js";
import type { Pipelines } from "./pipelines.js";
import { StagingRing } from "./staging.js";
import { checkTimestamps, Timestamps } from "./timestamps.js";

export interface DeviceBuffer {
  readonly gpu: GPUBuffer;
  readonly dtype: Dtype;
}

/** One buffer of the paged cache: a layer's keys or values. */
export interface PageStore {
  readonly group: number;
  readonly gpu: GPUBuffer;
  readonly pageBytes: number;
}

export interface ExecutorParts {
  /** The registry of the buffers that the executor makes itself. */
  readonly buffers: BufferRegistry;
  readonly faults: Faults;
  readonly shape: BackendShape;
  readonly pipelines: Pipelines;
  readonly weights: ReadonlyMap<string, DeviceBuffer>;
  readonly named: ReadonlyMap<string, DeviceBuffer>;
  readonly workspace: readonly GPUBuffer[];
  readonly cache: readonly PageStore[];
  /** The plans of each function by size, ascending. */
  readonly plans: Readonly<Record<FunctionName, ReadonlyMap<number, Plan>>>;
}

/** A launch with all resources bound to it. */
interface BoundLaunch {
  readonly pipeline: GPUComputePipeline;
  readonly bindings: GPUBindGroup;
  readonly grid: readonly [number, number, number];
}

/** WebGPU's limit on each extent of a dispatch; TVM's shaders fold z back into x. */
const MAX_GRID = 65535;

/** How long a device may take to report its fault after work on it has failed. */
export const LAST_WORD_MS = 500;

/** Replays plans on a WebGPU device. */
export class Executor implements Backend {
  readonly shape: BackendShape;
  readonly #parts: ExecutorParts;
  readonly #device: GPUDevice;
  readonly #staging: StagingRing;
  readonly #bound = new Map<Plan, readonly BoundLaunch[]>();
  readonly #gridUniforms = new Map<number, GPUBuffer>();
  #pageScratch: GPUBuffer | null = null;
  /** Commands recorded since the last submit. */
  #encoder: GPUCommandEncoder | null = null;
  #pass: GPUComputePassEncoder | null = null;
  #failure: DeviceError | null = null;
  readonly #endListening: () => void;
  #launches = 0;

  constructor(parts: ExecutorParts) {
    this.#parts = parts;
    this.shape = parts.shape;
    this.#device = parts.buffers.device;
    this.#staging = new StagingRing(parts.buffers);
    this.#endListening = parts.faults.listen((error) => {
      this.#failure ??= error;
    });
  }

  /** The number of kernels launched since the device was opened. */
  get launches(): number {
    return this.#launches;
  }

  /** The number of kernels that the smallest size of a function launches. */
  launchesOf(name: FunctionName): number {
    const [smallest] = this.#parts.plans[name].values();
    return smallest?.launches.length ?? 0;
  }

  /** Bytes of the cache, for another executor with a cache of the same size. */
  get kvMemory(): number {
    const { groups } = this.shape;
    const bytes = this.#parts.cache.map(({ group, pageBytes }) => pageBytes * (groups[group]?.pages ?? 0));
    return bytes.reduce((sum, count) => sum + count, 0);
  }

  sizes(name: FunctionName): readonly number[] {
    return [...this.#parts.plans[name].keys()];
  }

  missing(name: FunctionName, size: number): number {
    if (this.#bound.has(this.#plan(name, size))) return 0;
    return this.#kernels(name, size).filter((kernel) => !this.#parts.pipelines.get(kernel)).length;
  }

  async prepare(name: FunctionName, size: number, onKernel?: () => void): Promise<void> {
    const { faults } = this.#parts;
    if (faults.lost) throw faults.lost;
    const compiling = this.#kernels(name, size).map(async (kernel) => {
      if (this.#parts.pipelines.get(kernel)) return;
      await this.#parts.pipelines.compile(kernel);
      onKernel?.();
    });
    try {
      await Promise.all(compiling);
    } catch (error) {
      await this.#lastWord();
      // Any other fault that the device reports belongs to a step, and the next fetch throws it.
      throw faults.lost ?? error;
    }
  }

  write(buffer: BufferName, data: HostArray, offset = 0): void {
    // The queue would put the write before commands that are recorded but not yet submitted.
    this.#submit();
    const { gpu } = this.#named(buffer);
    this.#device.queue.writeBuffer(
      gpu,
      offset * data.BYTES_PER_ELEMENT,
      data.buffer,
      data.byteOffset,
      data.byteLength,
    );
  }

  run(name: FunctionName, size: number): void {
    const launches = this.#launchesOf(name, size);
    this.#pass ??= this.#commands().beginComputePass();
    for (const launch of launches) dispatch(this.#pass, launch);
    this.#launches += launches.length;
  }

  checkTimes(): void {
    checkTimestamps(this.#device);
  }

  /** Each launch has a pass of its own, because WebGPU measures time where passes begin and end. */
  async profile(name: FunctionName, size: number): Promise<number[]> {
    if (this.#failure) throw this.#failure;
    const launches = this.#launchesOf(name, size);
    const stamps = new Timestamps(this.#parts.buffers, launches.length);
    try {
      this.#endPass();
      for (const [i, launch] of launches.entries()) {
        const pass = this.#commands().beginComputePass({ timestampWrites: stamps.around(i) });
        dispatch(pass, launch);
        pass.end();
      }
      const staging = this.#staging.acquire(stamps.bytes);
      stamps.end(this.#commands(), staging);
      this.#submit();
      return await this.#read(staging, stamps.bytes, (data) => stamps.milliseconds(data));
    } finally {
      stamps.free();
    }
  }

  launchesIn(name: FunctionName, size: number): { kernel: string; weightBytes: number }[] {
    return this.#plan(name, size).launches.map(({ kernel, args }) => {
      // A launch that looks tokens up does not read the whole table.
      const whole = args.some(({ space, name }) => space === "buffer" && name === "tokens") ? [] : args;
      const weights = whole.filter(({ space }) => space === "weight").map((arg) => this.#argument(arg).size);
      return { kernel, weightBytes: weights.reduce((sum, bytes) => sum + bytes, 0) };
    });
  }

  copyPage(group: number, from: number, to: number): void {
    // Pages are copied through a scratch page, because WebGPU copies only between two different buffers.
    const largest = Math.max(...this.#parts.cache.map(({ pageBytes }) => pageBytes));
    const usage = GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    this.#pageScratch ??= this.#parts.buffers.create("page scratch", largest, usage);
    this.#endPass();
    for (const { gpu, pageBytes } of this.#parts.cache.filter((store) => store.group === group)) {
      this.#commands().copyBufferToBuffer(gpu, from * pageBytes, this.#pageScratch, 0, pageBytes);
      this.#commands().copyBufferToBuffer(this.#pageScratch, 0, gpu, to * pageBytes, pageBytes);
    }
  }

  async fetch(reads: readonly Read[]): Promise<HostArray[]> {
    if (this.#failure) throw this.#failure;
    this.#endPass();
    const bytes = reads.reduce((sum, { count }) => sum + 4 * count, 0);
    const staging = this.#staging.acquire(bytes);
    let offset = 0;
    for (const { buffer, count } of reads) {
      this.#commands().copyBufferToBuffer(this.#named(buffer).gpu, 0, staging, offset, 4 * count);
      offset += 4 * count;
    }
    this.#submit();
    return this.#read(staging, bytes, (data) => this.#split(data, reads));
  }

  /** Ends this executor and frees the buffers that it made; the device and its other buffers stay. */
  retire(): void {
    this.#end(new DeviceError("Another executor has taken this one's place."));
    this.#parts.buffers.freeAll();
  }

  dispose(): void {
    this.#end(disposedError());
    this.#parts.buffers.close();
  }

  #end(why: DeviceError): void {
    this.#endListening();
    this.#failure ??= why;
    this.#encoder = null;
    this.#pass = null;
    this.#bound.clear();
  }

  async #read<T>(staging: GPUBuffer, bytes: number, read: (data: ArrayBuffer) => T): Promise<T> {
    let result: T;
    try {
      result = await this.#staging.read(staging, bytes, read);
    } catch (error) {
      await this.#lastWord();
      throw this.#failure ?? error;
    }
    // After commands that the device rejected, the buffer still holds what an earlier step wrote.
    if (this.#failure) throw this.#failure;
    return result;
  }

  /** Waits a moment for the device's own report of why work on it failed. */
  async #lastWord(): Promise<void> {
    const { lost } = this.#device;
    await Promise.race([lost, new Promise((resolve) => setTimeout(resolve, LAST_WORD_MS))]);
  }

  #launchesOf(name: FunctionName, size: number): readonly BoundLaunch[] {
    const plan = this.#plan(name, size);
    let launches = this.#bound.get(plan);
    if (!launches) {
      launches = plan.launches.map((launch) => this.#bind(launch));
      this.#bound.set(plan, launches);
    }
    return launches;
  }

  #kernels(name: FunctionName, size: number): string[] {
    return [...new Set(this.#plan(name, size).launches.map(({ kernel }) => kernel))];
  }

  #plan(name: FunctionName, size: number): Plan {
    const plan = this.#parts.plans[name].get(size);
    if (!plan) throw new Error(`the artifact has no plan ${name}.${size}`);
    return plan;
  }

  #split(data: ArrayBuffer, reads: readonly Read[]): HostArray[] {
    let offset = 0;
    return reads.map(({ buffer, count }) => {
      const part = data.slice(offset, offset + 4 * count);
      offset += 4 * count;
      return hostArray(this.#named(buffer).dtype, part);
    });
  }

  #bind({ kernel, grid: [x, y, z], args }: Plan["launches"][number]): BoundLaunch {
    const made = this.#parts.pipelines.get(kernel);
    if (!made) throw new Error(`the kernel ${kernel} is not compiled; prepare() comes before run()`);
    const resources = [...args.map((arg) => this.#argument(arg)), this.#gridUniform(x)];
    const entries = resources.map((buffer, binding) => ({ binding, resource: { buffer } }));
    const bindings = this.#device.createBindGroup({ label: kernel, layout: made.layout, entries });
    const grid: BoundLaunch["grid"] = x > MAX_GRID ? [MAX_GRID, y, Math.ceil(x / MAX_GRID)] : [x, y, z];
    return { pipeline: made.pipeline, bindings, grid };
  }

  #argument({ space, name }: PlanArg): GPUBuffer {
    const { weights, workspace } = this.#parts;
    const found =
      space === "weight"
        ? weights.get(name)?.gpu
        : space === "workspace"
          ? workspace[Number(name)]
          : this.#parts.named.get(name)?.gpu;
    if (!found) throw new Error(`a plan names ${space}:${name}, which manifest.json does not list`);
    return found;
  }

  /** One uniform buffer for each width of a grid. */
  #gridUniform(x: number): GPUBuffer {
    const known = this.#gridUniforms.get(x);
    if (known) return known;
    const usage = GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST;
    const buffer = this.#parts.buffers.create(`packGridDimX ${x}`, 16, usage);
    this.#device.queue.writeBuffer(buffer, 0, new Uint32Array([x - 1]));
    this.#gridUniforms.set(x, buffer);
    return buffer;
  }

  #named(name: string): DeviceBuffer {
    const found = this.#parts.named.get(name);
    if (!found) throw new Error(`the artifact has no buffer ${name}`);
    return found;
  }

  #commands(): GPUCommandEncoder {
    this.#encoder ??= this.#device.createCommandEncoder();
    return this.#encoder;
  }

  #endPass(): void {
    this.#pass?.end();
    this.#pass = null;
  }

  #submit(): void {
    this.#endPass();
    if (this.#encoder) this.#device.queue.submit([this.#encoder.finish()]);
    this.#encoder = null;
  }
}

function dispatch(pass: GPUComputePassEncoder, { pipeline, bindings, grid }: BoundLaunch): void {
  pass.setPipeline(pipeline);
  pass.setBindGroup(0, bindings);
  pass.dispatchWorkgroups(...grid);
}

function hostArray(dtype: Dtype, data: ArrayBuffer): HostArray {
  switch (dtype) {
    case "int32":
      return new Int32Array(data);
    case "uint32":
      return new Uint32Array(data);
    case "float32":
      return new Float32Array(data);
    default:
      throw new Error(`buffers of ${dtype} stay on the device`);
  }
}
