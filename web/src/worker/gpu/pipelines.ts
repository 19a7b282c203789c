import { DeviceError } from "../../both/errors.js";
import type { KernelEntry } from "../../both/manifest.js";

/** A kernel's source, with what the manifest says about it. */
export interface Shader extends Pick<KernelEntry, "entry" | "access"> {
  readonly code: string;
}

export interface KernelPipeline {
  readonly pipeline: GPUComputePipeline;
  readonly layout: GPUBindGroupLayout;
}

/**
 * Compiles kernels when they are wanted. An artifact has several sizes of each function; a GPU compiles them
 * all in a second or two, but SwiftShader was seen to take 120 s for the 57 kernels of a small model, and one
 * answer needs few.
 */
export class Pipelines {
  readonly #layouts = new Map<string, GPUBindGroupLayout>();
  readonly #compiling = new Map<string, Promise<void>>();
  readonly #compiled = new Map<string, KernelPipeline>();

  constructor(
    private readonly device: GPUDevice,
    private readonly shaders: ReadonlyMap<string, Shader>,
  ) {}

  /** A kernel that has been compiled already. */
  get(kernel: string): KernelPipeline | undefined {
    return this.#compiled.get(kernel);
  }

  /** Rejects with DeviceError where the device refuses the kernel. */
  compile(kernel: string): Promise<void> {
    const known = this.#compiling.get(kernel);
    if (known) return known;
    const compiling = this.#compile(kernel);
    this.#compiling.set(kernel, compiling);
    return compiling;
  }

  async #compile(kernel: string): Promise<void> {
    const shader = this.shaders.get(kernel);
    if (!shader) throw new Error(`the artifact has no kernel ${kernel}`);
    const layout = this.#layout(shader.access);
    try {
      const pipeline = await this.device.createComputePipelineAsync({
        label: kernel,
        layout: this.device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: {
          module: this.device.createShaderModule({ label: kernel, code: shader.code }),
          entryPoint: shader.entry,
        },
      });
      this.#compiled.set(kernel, { pipeline, layout });
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new DeviceError(`The kernel ${kernel} does not compile on this GPU: ${reason}`, { cause });
    }
  }

  /**
   * The storage arguments, then the uniform that holds packGridDimX. Kernels with like arguments share a
   * layout.
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
