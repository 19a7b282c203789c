import { DeviceError, throwIfAborted } from "../../both/errors.js";
import { FUNCTIONS } from "../../both/format.js";
import { type Fetch, fetchText, within } from "../../both/http.js";
import type { FunctionName, KernelEntry, Manifest, Program, TensorEntry } from "../../both/manifest.js";
import type { ProgramChoice } from "../../both/messages.js";
import { type Launch, type Plan, parsePlan, planNames } from "../plan.js";
import { ropeTable } from "../rope.js";
import type { ShardCache } from "../store/shard-cache.js";
import { type ShardProgress, streamShards } from "../store/shards.js";
import { BufferRegistry } from "./buffers.js";
import { openDevice } from "./device.js";
import { type DeviceBuffer, Executor, type PageStore } from "./executor.js";
import {
  bufferBytes,
  cacheBuffers,
  DEFAULT_KV_MEMORY,
  type MemoryOptions,
  type MemoryPlan,
  planMemory,
} from "./memory.js";
import { Pipelines, type Shader } from "./pipelines.js";

export interface LoadOptions extends MemoryOptions {
  /** Only the program of this name. */
  readonly program?: string | undefined;
  readonly fetch?: Fetch | undefined;
  readonly signal?: AbortSignal | undefined;
  readonly cache: ShardCache | null;
  readonly onProgram?: ((program: Program, choice: ProgramChoice) => void) | undefined;
  readonly onShards?: ((progress: ShardProgress) => void) | undefined;
  readonly onWarning?: ((message: string) => void) | undefined;
}

export interface LoadedExecutor {
  readonly executor: Executor;
  readonly buffers: BufferRegistry;
  readonly program: Program;
  readonly choice: ProgramChoice;
  readonly adapterName: string;
}

/**
 * Opens a device for the artifact at `base` and puts everything on it. Frees all of it when anything fails.
 */
export async function loadExecutor(
  base: URL,
  manifest: Manifest,
  options: LoadOptions,
): Promise<LoadedExecutor> {
  const { device, program, choice, adapterName } = await openDevice(manifest, options.program);
  options.onProgram?.(program, choice);
  const buffers = new BufferRegistry(device);
  const stop = new AbortController();
  const signal = options.signal ? AbortSignal.any([options.signal, stop.signal]) : stop.signal;
  try {
    const loader = new Loader(base, manifest, program, buffers, { ...options, signal });
    return { executor: await loader.load(), buffers, program, choice, adapterName };
  } catch (error) {
    stop.abort();
    buffers.freeAll();
    device.destroy();
    throw error;
  }
}

class Loader {
  constructor(
    private readonly base: URL,
    private readonly manifest: Manifest,
    private readonly program: Program,
    private readonly buffers: BufferRegistry,
    private readonly options: LoadOptions,
  ) {}

  async load(): Promise<Executor> {
    throwIfAborted(this.options.signal);
    // Memory first: a device that is too small should say so before the download, not after it.
    const weights = await this.#allocateWeights();
    const { memory, ...rest } = await this.#allocateWorkingMemory();
    const streaming = this.#streamWeights(weights);
    streaming.catch(() => undefined);
    const [shaders, plans] = await Promise.all([this.#fetchShaders(), this.#fetchPlans()]);
    const pipelines = new Pipelines(this.buffers.device, shaders);
    // While the weights come in. A GPU compiles the rest at leisure; on a processor that would take the
    // answer's time.
    const decode = [...firstOf(plans.step), ...firstOf(plans.greedy)].map(({ kernel }) =>
      pipelines.compile(kernel),
    );
    if (!isSoftware(this.buffers.device.adapterInfo))
      for (const kernel of shaders.keys()) pipelines.compile(kernel).catch(() => undefined);
    const [frequencies] = await Promise.all([streaming, ...decode]);
    throwIfAborted(this.options.signal);
    const { model, cache, groups } = this.manifest;
    const shape = {
      groups: groups.map(({ window }, group) => ({ window, pages: memory.pages[group] ?? 0 })),
      pageSize: cache.pageSize,
      slots: cache.slots,
      pagesPerSlot: Math.ceil(model.contextLength / cache.pageSize),
      contextLength: memory.contextLength,
      vocabSize: model.vocabSize,
    };
    const executor = new Executor({ buffers: this.buffers, shape, pipelines, weights, plans, ...rest });
    this.#initialize(executor, frequencies, memory);
    return executor;
  }

  #allocateWeights(): Promise<Map<string, DeviceBuffer>> {
    const { tensors, bytes } = this.manifest.weights;
    const advice =
      `The weights alone need ${bytes} bytes. ` +
      "Close other tabs, or use a smaller or more quantized model.";
    return this.buffers.guarded("the weights", advice, () => {
      const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST;
      const make = ({ name, bytes: size, dtype }: TensorEntry): [string, DeviceBuffer] => [
        name,
        { gpu: this.buffers.create(name, size, usage), dtype },
      ];
      return new Map(tensors.map(make));
    });
  }

  /**
   * Cache, inputs, outputs, workspace. Where the caller left the cache's size open, less is tried before
   * giving up.
   */
  async #allocateWorkingMemory(): Promise<WorkingMemory> {
    const { kvMemory } = this.options;
    for (let budget = kvMemory ?? DEFAULT_KV_MEMORY; ; budget /= 2) {
      const limit = this.buffers.device.limits.maxStorageBufferBindingSize;
      const memory = planMemory(this.manifest, this.program, limit, { ...this.options, kvMemory: budget });
      const advice =
        `Of this ${memory.kvBytes} bytes are KV cache for ${memory.contextLength} tokens: give ` +
        "createEngine a smaller kvMemory or contextLength.";
      try {
        return await this.buffers.guarded("the cache and the workspace", advice, () =>
          this.#workingMemory(memory),
        );
      } catch (error) {
        const smaller = kvMemory === undefined && budget > DEFAULT_KV_MEMORY / 32;
        if (!(error instanceof DeviceError) || !smaller) throw error;
      }
    }
  }

  #workingMemory(memory: MemoryPlan): WorkingMemory {
    const named = new Map<string, DeviceBuffer>();
    const { STORAGE, COPY_SRC, COPY_DST } = GPUBufferUsage;
    for (const entry of this.manifest.buffers) {
      const bytes = bufferBytes(entry, this.program, memory);
      const gpu = this.buffers.create(entry.name, bytes, STORAGE | COPY_SRC | COPY_DST);
      named.set(entry.name, { gpu, dtype: entry.dtype === "kv" ? this.program.kvDtype : entry.dtype });
    }
    const cache = cacheBuffers(this.manifest, this.program).flatMap(({ name, ...page }): PageStore[] => {
      const buffer = named.get(name);
      return buffer ? [{ gpu: buffer.gpu, ...page }] : [];
    });
    const workspace = this.program.workspace.map((bytes, i) =>
      this.buffers.create(`workspace ${i}`, bytes, STORAGE),
    );
    return { memory, named, cache, workspace };
  }

  async #fetchShaders(): Promise<Map<string, Shader>> {
    const read = async ([name, { file, sha256, entry, access }]: [string, KernelEntry]): Promise<
      [string, Shader]
    > => {
      return [name, { code: await this.#text(file, sha256), entry, access }];
    };
    return new Map(await Promise.all([...this.program.kernels].map(read)));
  }

  async #fetchPlans(): Promise<Record<FunctionName, Map<number, Plan>>> {
    const names = planNames(this.manifest, this.program);
    const read = async (name: FunctionName): Promise<[FunctionName, Map<number, Plan>]> => {
      const entries = this.program.functions[name].map(async (bucket) => {
        return [
          bucket.size,
          parsePlan(await this.#text(bucket.plan, bucket.sha256), name, bucket, names),
        ] as const;
      });
      return [name, new Map(await Promise.all(entries))];
    };
    return Object.fromEntries(await Promise.all(FUNCTIONS.map(read))) as Record<
      FunctionName,
      Map<number, Plan>
    >;
  }

  /**
   * Puts the shards into the tensors' buffers one by one; returns the tensors that the host needs itself, by
   * name.
   */
  async #streamWeights(weights: ReadonlyMap<string, DeviceBuffer>): Promise<Map<string, Float32Array>> {
    const { shards, shardBytes, tensors } = this.manifest.weights;
    const { queue } = this.buffers.device;
    const { onShards: onProgress, ...options } = this.options;
    const wanted = new Set([...this.manifest.ropes.values()].map(({ invFreq }) => invFreq));
    const onHost = new Map(
      tensors.filter(({ name }) => wanted.has(name)).map(({ name, bytes }) => [name, new Uint8Array(bytes)]),
    );
    let start = 0;
    for await (const shard of streamShards(this.base, shards, { ...options, onProgress })) {
      for (const { tensor, part, at } of partsIn(tensors, start, shard)) {
        const target = weights.get(tensor.name);
        if (target) queue.writeBuffer(target.gpu, at, padded(part));
        onHost.get(tensor.name)?.set(part, at);
      }
      // Without this the queue holds a copy of every shard at once.
      await queue.onSubmittedWorkDone();
      start += shardBytes;
    }
    return new Map([...onHost].map(([name, { buffer }]) => [name, new Float32Array(buffer)]));
  }

  /**
   * What buffers hold from the start on and zeros will not do for: rotations, and that every token is
   * allowed.
   */
  #initialize(
    executor: Executor,
    frequencies: ReadonlyMap<string, Float32Array>,
    { contextLength }: MemoryPlan,
  ): void {
    for (const [name, { invFreq, scale }] of this.manifest.ropes)
      executor.write(
        `rope.${name}`,
        ropeTable(frequencies.get(invFreq) ?? new Float32Array(), scale, contextLength),
      );
    const { slots } = this.manifest.cache;
    const words = Math.ceil(this.manifest.model.vocabSize / 32);
    executor.write("allowed", new Uint32Array(slots * words).fill(0xffffffff));
  }

  #text(file: string, sha256: string): Promise<string> {
    const { fetch, signal } = this.options;
    return fetchText(within(this.base, file), sha256, { fetch, signal });
  }
}

function isSoftware({ architecture, isFallbackAdapter }: GPUAdapterInfo): boolean {
  return isFallbackAdapter || architecture === "swiftshader";
}

/** The launches of a function's smallest size. */
function firstOf(plans: ReadonlyMap<number, Plan>): readonly Launch[] {
  const [smallest] = plans.values();
  return smallest?.launches ?? [];
}

interface WorkingMemory {
  readonly memory: MemoryPlan;
  readonly named: Map<string, DeviceBuffer>;
  readonly cache: PageStore[];
  readonly workspace: GPUBuffer[];
}

interface TensorPart {
  readonly tensor: TensorEntry;
  readonly part: Uint8Array<ArrayBuffer>;
  /** Byte of the tensor at which the part starts. */
  readonly at: number;
}

/** The parts of tensors that lie in `shard`, whose first byte is byte `start` of the stream. */
export function* partsIn(
  tensors: readonly TensorEntry[],
  start: number,
  shard: Uint8Array<ArrayBuffer>,
): Generator<TensorPart> {
  const end = start + shard.length;
  for (const tensor of tensors) {
    const from = Math.max(tensor.offset, start);
    const to = Math.min(tensor.offset + tensor.bytes, end);
    if (from < to) yield { tensor, part: shard.subarray(from - start, to - start), at: from - tensor.offset };
  }
}

/** writeBuffer takes multiples of 4 bytes; the last part of a float16 tensor may have 2 more. */
function padded(part: Uint8Array<ArrayBuffer>): Uint8Array<ArrayBuffer> {
  if (part.length % 4 === 0) return part;
  const whole = new Uint8Array(Math.ceil(part.length / 4) * 4);
  whole.set(part);
  return whole;
}
