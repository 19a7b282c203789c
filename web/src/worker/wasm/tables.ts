import type { Dim, Dtype, KernelParam, Program } from "../../artifact/manifest.js";
import { DTYPE_BYTES } from "../../format/constants.js";
import { ArtifactError } from "../../protocol/errors.js";
import type { Extents } from "../device/memory.js";
import { extentOf } from "../device/memory.js";
import type { Launch, Plan, PlanArg } from "../device/plan.js";
import type { Region } from "./layout.js";

/**
 * Plans in the form that the module reads (docs/wasm.md, "Tables"): tensors, arguments and launches, at
 * addresses.
 */

const TENSOR = 40;
const EXTENT = 8;
const ARGUMENT = 16;
const LAUNCH = 32;

/** TVMFFIAny's type index of a value that is the address of a tensor. */
const TENSOR_ADDRESS = 7;
const PROCESSOR = 1;
const CODES = { int: 0, uint: 1, float: 2 } as const;

interface Tensor {
  readonly arg: PlanArg;
  readonly dtype: Dtype;
  readonly extents: readonly number[];
  /** The offset of the tensor within the tables. */
  readonly at: number;
}

/** The address of a plan's launches, and their number. */
export interface BoundPlan {
  readonly at: number;
  readonly count: number;
}

/** The addresses to which the tables of a program point. */
export interface Targets {
  region(arg: PlanArg): Region;
  /** The number that stands for a kernel in a launch. */
  kernel(name: string): number;
}

/** The tables of all plans of a program; `write` writes them to memory. */
export class Tables {
  readonly #tensors = new Map<string, Tensor>();
  readonly #launches: { readonly launch: Launch; readonly tensors: readonly Tensor[] }[] = [];
  /** The index of each plan's first launch among all launches. */
  readonly #starts = new Map<Plan, number>();
  #bytes = 0;

  /** `shapes` are the shapes of the buffers in the program, with the words of the manifest. */
  constructor(
    plans: Iterable<Plan>,
    { routines }: Program,
    private readonly shapes: ReadonlyMap<string, readonly Dim[]>,
    private readonly extents: Extents,
  ) {
    for (const plan of plans) {
      this.#starts.set(plan, this.#launches.length);
      for (const launch of plan.launches) {
        const params = routines.get(launch.kernel) ?? [];
        const tensors = launch.args.flatMap((arg, i) => {
          const param = params[i];
          return param ? [this.#tensor(arg, param)] : [];
        });
        this.#launches.push({ launch, tensors });
      }
    }
  }

  get bytes(): number {
    const args = this.#launches.reduce((sum, { tensors }) => sum + tensors.length, 0);
    return this.#bytes + args * ARGUMENT + this.#launches.length * LAUNCH;
  }

  /** Writes the tables at `base`; returns each plan's launches. */
  write(memory: ArrayBufferLike, base: number, targets: Targets): Map<Plan, BoundPlan> {
    const view = new DataView(memory, base, this.bytes);
    for (const tensor of this.#tensors.values()) writeTensor(view, base, tensor, targets.region(tensor.arg));
    let argument = this.#bytes;
    const first = this.bytes - this.#launches.length * LAUNCH;
    this.#launches.forEach(({ launch, tensors }, i) => {
      const at = first + i * LAUNCH;
      view.setUint32(at, targets.kernel(launch.kernel), true);
      view.setUint32(at + 4, base + argument, true);
      view.setUint32(at + 8, tensors.length, true);
      for (const tensor of tensors) {
        view.setInt32(argument, TENSOR_ADDRESS, true);
        view.setUint32(argument + 8, base + tensor.at, true);
        argument += ARGUMENT;
      }
    });
    const bound = ([plan, start]: [Plan, number]): [Plan, BoundPlan] => {
      return [plan, { at: base + first + start * LAUNCH, count: plan.launches.length }];
    };
    return new Map([...this.#starts].map(bound));
  }

  /**
   * The shape comes from the buffer and not from the kernel's record: groups of layers share kernels, whose
   * record names the pages of one group.
   */
  #tensor(arg: PlanArg, { dtype, shape }: KernelParam): Tensor {
    const dims = (arg.space === "buffer" && this.shapes.get(arg.name)) || shape;
    const extents = dims.map((dim) => extentOf(dim, this.extents));
    const key = `${arg.space}:${arg.name} ${dtype} ${extents}`;
    const known = this.#tensors.get(key);
    if (known) return known;
    const tensor = { arg, dtype, extents, at: this.#bytes };
    this.#tensors.set(key, tensor);
    this.#bytes += TENSOR + extents.length * EXTENT;
    return tensor;
  }
}

/** The address of launch number `index` of a plan. */
export function launchAt({ at }: BoundPlan, index: number): number {
  return at + index * LAUNCH;
}

function writeTensor(
  view: DataView,
  base: number,
  { arg, dtype, extents, at }: Tensor,
  region: Region,
): void {
  const bytes = extents.reduce((product, extent) => product * extent, DTYPE_BYTES[dtype]);
  if (bytes > region.bytes)
    throw new ArtifactError(
      `A kernel wants ${arg.space}:${arg.name} as ${dtype} [${extents}], ${bytes} bytes; it has ` +
        `${region.bytes}. Build the artifact again.`,
    );
  view.setUint32(at, region.at, true);
  view.setInt32(at + 4, PROCESSOR, true);
  view.setInt32(at + 12, extents.length, true);
  view.setUint8(at + 16, codeOf(dtype));
  view.setUint8(at + 17, 8 * DTYPE_BYTES[dtype]);
  view.setUint16(at + 18, 1, true);
  view.setUint32(at + 20, base + at + TENSOR, true);
  extents.forEach((extent, i) => {
    view.setBigInt64(at + TENSOR + i * EXTENT, BigInt(extent), true);
  });
}

function codeOf(dtype: Dtype): number {
  return dtype.startsWith("u") ? CODES.uint : dtype.startsWith("i") ? CODES.int : CODES.float;
}
