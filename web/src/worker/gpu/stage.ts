import { DeviceLostError, throwIfAborted } from "../../both/errors.js";
import type { Manifest, Program } from "../../both/manifest.js";
import type { Launch, Plan } from "../plan.js";
import { ropeTable } from "../rope.js";
import type { ShardOptions } from "../store/shards.js";
import { BufferRegistry } from "./buffers.js";
import { type DeviceBuffer, Executor, LAST_WORD_MS } from "./executor.js";
import type { MemoryOptions, MemoryPlan } from "./memory.js";
import { Pipelines } from "./pipelines.js";
import type { Plans, RemoteArtifact } from "./remote-artifact.js";
import { POSITION } from "./trial.js";
import { allocateWeights, streamWeights } from "./weights.js";
import { allocate, allocateWhole, type WorkingMemory } from "./working-memory.js";

export type StageOptions = MemoryOptions &
  Omit<ShardOptions, "signal"> & {
    readonly signal: AbortSignal;
    /** Whether a processor plays the GPU. */
    readonly software: boolean;
    /** How many of the kernels are compiled that the load waits for. */
    readonly onKernels?: ((compiled: number, total: number) => void) | undefined;
  };

/** A program's kernels and plans, on a device. */
interface Code {
  readonly kernels: readonly string[];
  readonly pipelines: Pipelines;
  readonly plans: Plans;
}

/** A device with an artifact's weights, and executors of its programs beside one another over them. */
export class Stage {
  readonly buffers: BufferRegistry;
  readonly #code = new Map<Program, Promise<Code>>();
  readonly #memory = new Map<Program, WorkingMemory>();
  /** The program that will run, once its memory is as it will be. */
  #settled: { readonly program: Program; readonly memory: WorkingMemory } | null = null;
  #isGone = false;
  #weights: ReadonlyMap<string, DeviceBuffer> = new Map();
  /** Tensors that the host needs itself. */
  #onHost: ReadonlyMap<string, Float32Array> = new Map();

  private constructor(
    private readonly artifact: RemoteArtifact,
    private readonly device: GPUDevice,
    private readonly main: Program,
    private readonly tried: boolean,
    private readonly options: StageOptions,
  ) {
    this.buffers = new BufferRegistry(device);
    void device.lost.then(() => {
      this.#isGone = true;
    });
  }

  /**
   * Puts the weights on the device, with room for `main` as it will run. `tried`: its kernels wait for a
   * trial; else they are compiled meanwhile.
   */
  static async open(
    artifact: RemoteArtifact,
    device: GPUDevice,
    main: Program,
    tried: boolean,
    options: StageOptions,
  ): Promise<Stage> {
    const stop = new AbortController();
    const signal = AbortSignal.any([options.signal, stop.signal]);
    const stage = new Stage(artifact, device, main, tried, { ...options, signal });
    try {
      await stage.#load();
      return stage;
    } catch (error) {
      stop.abort();
      stage.close();
      throw error;
    }
  }

  /** An executor of the program; with as little of a cache as a trial needs, where it is not the main one. */
  async put(program: Program): Promise<Executor> {
    const { manifest } = this.artifact;
    let own = this.#memory.get(program);
    if (!own) {
      own = await allocate(this.buffers.part(), manifest, program, smallest(manifest));
      this.#memory.set(program, own);
    }
    return this.#executor(await this.#codeOf(program), own);
  }

  /** Room for the program as it will run; what the others had is freed. */
  async makeRoom(program: Program): Promise<void> {
    await this.#roomOf(program);
  }

  /** The executor of the program as it will run. */
  async settle(program: Program): Promise<Executor> {
    const own = await this.#roomOf(program);
    const code = await this.#codeOf(program);
    if (this.tried) await Promise.all(this.#compile(code));
    return this.#executor(code, own);
  }

  /** Whether the device is gone. */
  isLost(): Promise<boolean> {
    const silence = new Promise<boolean>((resolve) => setTimeout(resolve, LAST_WORD_MS, false));
    return Promise.race([this.device.lost.then(() => true), silence]);
  }

  close(): void {
    this.buffers.close();
  }

  async #roomOf(program: Program): Promise<WorkingMemory> {
    const { main, artifact, options } = this;
    if (this.#settled?.program === program) return this.#settled.memory;
    for (const [other, { buffers }] of this.#memory) {
      if (other === program && other === main) continue;
      buffers.freeAll();
      this.#memory.delete(other);
    }
    const memory =
      this.#memory.get(program) ??
      (await allocateWhole(this.buffers.part(), artifact.manifest, program, options));
    this.#memory.set(program, memory);
    this.#settled = { program, memory };
    return memory;
  }

  async #load(): Promise<void> {
    const { artifact, device, main, options } = this;
    throwIfAborted(options.signal);
    // Memory first: a device that is too small should say so before the download, not after it.
    this.#weights = await allocateWeights(this.buffers, artifact);
    this.#memory.set(main, await allocateWhole(this.buffers.part(), artifact.manifest, main, options));
    const streaming = streamWeights(artifact, this.#weights, device, options);
    streaming.catch(() => undefined);
    const code = await this.#codeOf(main);
    const compiling = this.tried ? [] : this.#compile(code);
    [this.#onHost] = await Promise.all([streaming, ...compiling]);
    throwIfAborted(options.signal);
    // Writing to a lost device is no error. It must not look as if a program that is tried next had lost it.
    if (this.#isGone)
      throw new DeviceLostError("The GPU was lost while the model was loaded. Load the model again.");
  }

  /** While the weights come in. A GPU compiles all at leisure; a processor would take the answer's time. */
  #compile({ kernels, pipelines, plans }: Code): Promise<void>[] {
    const { onKernels } = this.options;
    const decode = new Set([...firstOf(plans.step), ...firstOf(plans.greedy)].map(({ kernel }) => kernel));
    let compiled = 0;
    const compiling = [...decode].map(async (kernel) => {
      await pipelines.compile(kernel);
      onKernels?.(++compiled, decode.size);
    });
    if (!this.options.software)
      for (const kernel of kernels) pipelines.compile(kernel, true).catch(() => undefined);
    return compiling;
  }

  #codeOf(program: Program): Promise<Code> {
    const known = this.#code.get(program);
    if (known) return known;
    const { artifact, device, options } = this;
    const read = async (): Promise<Code> => {
      const [shaders, plans] = await Promise.all([
        artifact.shaders(program, options.signal),
        artifact.plans(program, options.signal),
      ]);
      return { kernels: [...shaders.keys()], pipelines: new Pipelines(device, shaders), plans };
    };
    const code = read();
    this.#code.set(program, code);
    return code;
  }

  #executor({ pipelines, plans }: Code, own: WorkingMemory): Executor {
    const { model, cache, groups } = this.artifact.manifest;
    const { memory, ...rest } = own;
    const shape = {
      groups: groups.map(({ window }, group) => ({ window, pages: memory.pages[group] ?? 0 })),
      pageSize: cache.pageSize,
      slots: cache.slots,
      pagesPerSlot: Math.ceil(model.contextLength / cache.pageSize),
      contextLength: memory.contextLength,
      vocabSize: model.vocabSize,
    };
    const executor = new Executor({ shape, pipelines, weights: this.#weights, plans, ...rest });
    this.#initialize(executor, memory);
    return executor;
  }

  /**
   * What buffers hold from the start on and zeros will not do for: rotations, and that every token is
   * allowed.
   */
  #initialize(executor: Executor, { contextLength }: MemoryPlan): void {
    const { ropes, cache, model } = this.artifact.manifest;
    for (const [name, { invFreq, scale }] of ropes)
      executor.write(
        `rope.${name}`,
        ropeTable(this.#onHost.get(invFreq) ?? new Float32Array(), scale, contextLength),
      );
    const words = Math.ceil(model.vocabSize / 32);
    executor.write("allowed", new Uint32Array(cache.slots * words).fill(0xffffffff));
  }
}

/** As little of a cache as a step of a trial needs: all positions lie in one page. */
function smallest({ groups, model }: Manifest): MemoryPlan {
  return {
    pages: groups.map(() => 1),
    contextLength: Math.min(POSITION + 1, model.contextLength),
    kvBytes: 0,
  };
}

/** The launches of a function's smallest size. */
function firstOf(plans: ReadonlyMap<number, Plan>): readonly Launch[] {
  const [smallest] = plans.values();
  return smallest?.launches ?? [];
}
