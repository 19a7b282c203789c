import { DeviceError, DeviceLostError, OutOfMemoryError } from "../../protocol/errors.js";
import type { Shader } from "../device/remote-artifact.js";

export interface KernelPipeline {
  readonly pipeline: GPUComputePipeline;
  readonly layout: GPUBindGroupLayout;
}

/**
 * The number of kernels that the browser compiles at once: enough for its threads, and few enough that an
 * urgent kernel does not wait long.
 */
const AT_ONCE = 8;

/** Messages of WebGPU implementations after the process that holds the GPU has ended. */
const GONE = /device (is |was )?(lost|destroyed)|Instance reference no longer exists|Instance dropped/i;
const NO_MEMORY = /out of (device |host |video )?memory|OutOfMemory|OUT_OF_.*MEMORY/i;

/** One pipeline, under the name of the first kernel that asked for it. */
class PipelineBuild {
  pipeline: KernelPipeline | null = null;
  begun = false;
  settle: { resolve: () => void; reject: (error: Error) => void } = { resolve: () => {}, reject: () => {} };
  readonly settled = new Promise<void>((resolve, reject) => {
    this.settle = { resolve, reject };
  });

  constructor(
    readonly kernel: string,
    readonly shader: Shader,
  ) {}
}

/**
 * Compiles kernels, several at once; kernels for which an answer waits come before kernels that may be needed
 * later. An artifact has several sizes of each function. A GPU compiles them all in a second or two, but
 * SwiftShader was seen to take 120 s for the 57 kernels of a small model, and one answer needs few. Kernels
 * with the same text are compiled once.
 */
export class Pipelines {
  readonly #layouts = new Map<string, GPUBindGroupLayout>();
  /** For each kernel, the first kernel with the same text. */
  readonly #contents: ReadonlyMap<string, string>;
  readonly #jobs = new Map<string, PipelineBuild>();
  readonly #wanted: PipelineBuild[] = [];
  readonly #later: PipelineBuild[] = [];
  #running = 0;
  #lost = false;

  constructor(
    private readonly device: GPUDevice,
    private readonly shaders: ReadonlyMap<string, Shader>,
  ) {
    void device.lost.then(() => {
      this.#lost = true;
    });
    const first = new Map<string, string>();
    const content = ([kernel, { code, entry, access }]: [string, Shader]): [string, string] => {
      const text = JSON.stringify([entry, access, code]);
      if (!first.has(text)) first.set(text, kernel);
      return [kernel, first.get(text) ?? kernel];
    };
    this.#contents = new Map([...shaders].map(content));
  }

  /** The pipeline of a kernel that has been compiled. */
  get(kernel: string): KernelPipeline | undefined {
    return this.#jobs.get(this.#contents.get(kernel) ?? kernel)?.pipeline ?? undefined;
  }

  /**
   * Compiles a kernel. Rejects with DeviceError if the device rejects the kernel, with OutOfMemoryError if
   * the device has no memory for it, and with DeviceLostError if the device is lost; the next call then tries
   * again. `later` says that nothing waits for the kernel.
   */
  async compile(kernel: string, later = false): Promise<void> {
    const shader = this.shaders.get(kernel);
    if (!shader) throw new Error(`the artifact has no kernel ${kernel}`);
    const content = this.#contents.get(kernel) ?? kernel;
    const job = this.#jobs.get(content) ?? new PipelineBuild(content, shader);
    this.#jobs.set(content, job);
    // A job may be in both queues; the second time it has already begun.
    if (!job.begun) (later ? this.#later : this.#wanted).push(job);
    this.#next();
    await job.settled;
  }

  #next(): void {
    while (this.#running < AT_ONCE) {
      const job = this.#wanted.shift() ?? this.#later.shift();
      if (!job) return;
      if (job.begun) continue;
      job.begun = true;
      this.#running += 1;
      void this.#make(job).finally(() => {
        this.#running -= 1;
        this.#next();
      });
    }
  }

  async #make(job: PipelineBuild): Promise<void> {
    const { kernel, shader, settle } = job;
    let refused: Promise<string | null> | null = null;
    try {
      const layout = this.#layout(shader.access);
      const checked = this.#module(kernel, shader.code);
      refused = checked.refused;
      const pipeline = await this.device.createComputePipelineAsync({
        label: kernel,
        layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: { module: checked.module, entryPoint: shader.entry },
      });
      job.pipeline = { pipeline, layout };
      settle.resolve();
    } catch (cause) {
      this.#jobs.delete(kernel);
      // The report that the device is lost comes after the errors that follow from the loss.
      await new Promise((resolve) => setTimeout(resolve, 0));
      settle.reject(this.#refusal(kernel, cause, (await refused) ?? messageOf(cause)));
    }
  }

  /**
   * Makes a shader's module in an error scope of its own, because outside of a scope the device reports an
   * error to all its users. `refused` has the compiler's messages for an invalid text, line by line.
   */
  #module(
    label: string,
    code: string,
  ): { readonly module: GPUShaderModule; readonly refused: Promise<string | null> } {
    this.device.pushErrorScope("validation");
    const module = this.device.createShaderModule({ label, code });
    const refused = this.device
      .popErrorScope()
      .then(async (error) => {
        if (!error) return null;
        const { messages } = await module.getCompilationInfo();
        const errors = messages.filter(({ type }) => type === "error");
        const said = errors.map(({ lineNum, linePos, message }) => `${lineNum}:${linePos} ${message}`);
        return said.join("; ") || error.message;
      })
      .catch(() => null);
    return { module, refused };
  }

  /**
   * WebGPU gives these errors no type when a pipeline is made, so they are recognized by the drivers'
   * messages.
   */
  #refusal(kernel: string, cause: unknown, reason: string): DeviceError {
    if (this.#lost || GONE.test(reason))
      return new DeviceLostError(`The GPU was lost as the kernel ${kernel} was compiled: ${reason}`, {
        cause,
      });
    if (NO_MEMORY.test(reason))
      return new OutOfMemoryError(`The GPU has no memory for the kernel ${kernel}: ${reason}`, { cause });
    const message = `The kernel ${kernel} does not compile on this GPU: ${reason}`;
    return new DeviceError(message, { code: "device-unsuitable", cause });
  }

  /**
   * The layout of the storage arguments and of the uniform with packGridDimX behind them. Kernels with the
   * same kinds of arguments share a layout.
   */
  #layout(access: Shader["access"]): GPUBindGroupLayout {
    const key = access.join();
    const known = this.#layouts.get(key);
    if (known) return known;
    const visibility = GPUShaderStage.COMPUTE;
    const storage = access.map((mode, binding): GPUBindGroupLayoutEntry => {
      return { binding, visibility, buffer: { type: mode === "read" ? "read-only-storage" : "storage" } };
    });
    const uniform: GPUBindGroupLayoutEntry = {
      binding: access.length,
      visibility,
      buffer: { type: "uniform" },
    };
    const layout = this.device.createBindGroupLayout({ entries: [...storage, uniform] });
    this.#layouts.set(key, layout);
    return layout;
  }
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
