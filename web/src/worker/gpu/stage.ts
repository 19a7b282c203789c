import type { Manifest, Program } from "../../artifact/manifest.js";
import { DeviceError, DeviceLostError, linkedAbort, throwIfAborted } from "../../protocol/errors.js";
import { initialize, shapeOf } from "../device/beginning.js";
import type { MemoryOptions, MemoryPlan } from "../device/memory.js";
import type { Launch, Plan } from "../device/plan.js";
import type { Plans, RemoteArtifact } from "../device/remote-artifact.js";
import type { ShardOptions } from "../store/shards.js";
import { BufferRegistry } from "./buffers.js";
import { type DeviceBuffer, Executor, LAST_WORD_MS } from "./executor.js";
import { Faults } from "./faults.js";
import { Pipelines } from "./pipelines.js";
import { finished } from "./staging.js";
import { type Finalists, POSITION, type TrialStage } from "./trial.js";
import { allocateWeights, streamWeights } from "./weights.js";
import { allocate, allocateWhole, type WorkingMemory } from "./working-memory.js";

export type StageOptions = MemoryOptions &
  Omit<ShardOptions, "signal"> & {
    readonly signal: AbortSignal;
    /** Whether the GPU is a software GPU. */
    readonly software: boolean;
    /** The programs of the first trial; empty if it is known which program will run. */
    readonly tried: readonly Program[];
    /** Progress of the kernels that the load waits for. */
    readonly onKernels?: ((compiled: number, total: number) => void) | undefined;
  };

/** A program's kernels and plans, on a device. */
interface Code {
  readonly kernels: readonly string[];
  readonly pipelines: Pipelines;
  readonly plans: Plans;
}

/** The memory of one program on the device. */
interface Place {
  readonly own: WorkingMemory;
  /** Whether there is memory for the program as it will run, and not only for a trial. */
  readonly whole: boolean;
}

/** A device with an artifact's weights, and the executors of several programs over these weights. */
export class Stage implements TrialStage<Executor> {
  readonly buffers: BufferRegistry;
  readonly #faults: Faults;
  readonly #code = new Map<Program, Promise<Code>>();
  readonly #compiling = new Map<Program, Promise<unknown>>();
  readonly #places = new Map<Program, Place>();
  readonly #executors = new Map<Program, Executor>();
  #weights: ReadonlyMap<string, DeviceBuffer> = new Map();
  /** Tensors that the host needs itself. */
  #onHost: ReadonlyMap<string, Float32Array> = new Map();

  private constructor(
    private readonly artifact: RemoteArtifact,
    private readonly device: GPUDevice,
    private readonly programs: Finalists,
    private readonly options: StageOptions,
  ) {
    this.buffers = new BufferRegistry(device);
    this.#faults = new Faults(this.buffers);
  }

  /**
   * Uploads the weights, and allocates memory for the first of the programs as it will run, or for another
   * one if that does not fit. With only one program, errors of its kernels are reported here.
   */
  static async open(
    artifact: RemoteArtifact,
    device: GPUDevice,
    programs: Finalists,
    options: StageOptions,
  ): Promise<Stage> {
    const { signal, stop } = linkedAbort(options.signal);
    const stage = new Stage(artifact, device, programs, { ...options, signal });
    try {
      await stage.#load();
      return stage;
    } catch (error) {
      stop();
      stage.close();
      throw error;
    }
  }

  async obtain(program: Program): Promise<void> {
    await this.#codeOf(program);
  }

  async put(program: Program): Promise<Executor> {
    const { manifest } = this.artifact;
    const code = await this.#codeOf(program);
    let place = this.#places.get(program);
    if (!place) {
      const own = await allocate(this.buffers.part(), manifest, program, smallest(manifest));
      place = { own, whole: false };
      this.#places.set(program, place);
    }
    return this.#executor(program, code, place.own);
  }

  async settle(program: Program): Promise<Executor> {
    const code = await this.#codeOf(program);
    const own = await this.#roomOf(program);
    await this.#compile(program, code);
    return this.#executor(program, code, own);
  }

  async drop(program: Program): Promise<void> {
    // Pending work ends first, so that its errors are not taken for another program's.
    await finished(this.device).catch(() => undefined);
    this.#clear(program);
    this.#code.delete(program);
    this.#compiling.delete(program);
  }

  /** Whether the device is gone. */
  isLost(): Promise<boolean> {
    const silence = new Promise<boolean>((resolve) => setTimeout(resolve, LAST_WORD_MS, false));
    return Promise.race([this.device.lost.then(() => true), silence]);
  }

  close(): void {
    for (const executor of this.#executors.values()) executor.retire();
    this.buffers.close();
  }

  /** Frees the program's memory on the device. */
  #clear(program: Program): void {
    this.#executors.get(program)?.retire();
    this.#executors.delete(program);
    this.#places.get(program)?.own.buffers.freeAll();
    this.#places.delete(program);
  }

  /** Allocates memory for the program as it will run; the memory of the others is freed. */
  async #roomOf(program: Program): Promise<WorkingMemory> {
    const { artifact, options } = this;
    const known = this.#places.get(program);
    for (const other of [...this.#places.keys()]) if (other !== program || !known?.whole) this.#clear(other);
    if (known?.whole) return known.own;
    const own = await allocateWhole(this.buffers.part(), artifact.manifest, program, options);
    this.#places.set(program, { own, whole: true });
    return own;
  }

  async #load(): Promise<void> {
    const { artifact, device, options, programs } = this;
    const alone = programs.length === 1;
    throwIfAborted(options.signal);
    // Memory comes first: a device that is too small should say so before the download, not after it.
    this.#weights = await allocateWeights(this.buffers, artifact);
    await this.#makeRoom();
    const streaming = streamWeights(artifact, this.#weights, device, options);
    streaming.catch(() => undefined);
    const preparing = options.tried.length > 0 ? this.#readAll(options.tried) : this.#prepare(programs[0]);
    preparing.catch(() => undefined);
    [this.#onHost] = await Promise.all([streaming, alone ? preparing : null]);
    throwIfAborted(options.signal);
    // Writing to a lost device gives no error, so the loss is checked here; otherwise the next program would
    // seem to have lost the device.
    if (this.#faults.lost)
      throw new DeviceLostError("The GPU was lost while the model was loaded. Load the model again.");
  }

  /** Allocates memory for the first program that fits: a small device may hold only one. */
  async #makeRoom(): Promise<void> {
    let first: unknown = null;
    for (const program of this.programs)
      try {
        await this.#roomOf(program);
        return;
      } catch (error) {
        if (!(error instanceof DeviceError)) throw error;
        first ??= error;
      }
    throw first;
  }

  /** Compiles the chosen program while the weights are downloaded. */
  async #prepare(program: Program): Promise<void> {
    await this.#compile(program, await this.#codeOf(program));
  }

  async #readAll(programs: readonly Program[]): Promise<void> {
    await Promise.all(programs.map((program) => this.#codeOf(program)));
  }

  #compile(program: Program, code: Code): Promise<unknown> {
    const compiling = this.#compiling.get(program) ?? Promise.all(this.#compileAll(code));
    this.#compiling.set(program, compiling);
    return compiling;
  }

  /**
   * Compiles the kernels that the load waits for. A GPU compiles all in a second or two, so that no answer
   * waits for a compiler; a software GPU takes minutes, and compiles what every answer needs. A failure among
   * the others fails the answer that requests it.
   */
  #compileAll({ kernels, pipelines, plans }: Code): Promise<void>[] {
    const { onKernels, software } = this.options;
    const decode = new Set([...firstOf(plans.step), ...firstOf(plans.greedy)].map(({ kernel }) => kernel));
    const others = software ? [] : kernels.filter((kernel) => !decode.has(kernel));
    const total = decode.size + others.length;
    let compiled = 0;
    const told = async (compiling: Promise<void>): Promise<void> => {
      await compiling;
      onKernels?.(++compiled, total);
    };
    return [
      ...[...decode].map((kernel) => told(pipelines.compile(kernel))),
      ...others.map((kernel) => told(pipelines.compile(kernel, true).catch(() => undefined))),
    ];
  }

  #codeOf(program: Program): Promise<Code> {
    const known = this.#code.get(program);
    if (known) return known;
    const { artifact, device, options } = this;
    const read = async (): Promise<Code> => {
      const files = await artifact.open(program, options.signal);
      const [shaders, plans] = await Promise.all([files.shaders(), files.plans()]);
      return { kernels: [...shaders.keys()], pipelines: new Pipelines(device, shaders), plans };
    };
    const code = read();
    code.catch(() => undefined);
    this.#code.set(program, code);
    return code;
  }

  /** Makes the program's only executor, which ignores earlier faults. */
  #executor(program: Program, { pipelines, plans }: Code, own: WorkingMemory): Executor {
    const { manifest } = this.artifact;
    const { memory, named, cache, workspace } = own;
    this.#executors.get(program)?.retire();
    const executor = new Executor({
      buffers: this.buffers.part(),
      faults: this.#faults,
      shape: shapeOf(manifest, memory),
      pipelines,
      plans,
      weights: this.#weights,
      named,
      cache,
      workspace,
    });
    this.#executors.set(program, executor);
    initialize(executor, manifest, (tensor) => this.#onHost.get(tensor) ?? new Float32Array());
    return executor;
  }
}

/** The smallest cache for a step of a trial: all positions are in one page. */
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
