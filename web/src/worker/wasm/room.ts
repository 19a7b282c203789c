import type { Manifest, Program } from "../../artifact/manifest.js";
import { DeviceError } from "../../protocol/errors.js";
import { type MemoryOptions, type MemoryPlan, storedAs, whatFits } from "../device/memory.js";
import type { Plans } from "../device/remote-artifact.js";
import { layOut, type MemoryLayout, MOST_BYTES, makeMemory } from "./layout.js";
import { Tables } from "./tables.js";

/** A memory, and the addresses in it. */
export interface Room {
  readonly memory: WebAssembly.Memory;
  readonly plan: MemoryPlan;
  readonly layout: MemoryLayout;
  readonly tables: Tables;
}

export interface RoomOptions extends MemoryOptions {
  /** The number of threads, the first one included. */
  readonly threads: number;
  readonly shared: boolean;
}

/**
 * Allocates memory for the weights and a cache of the size that the caller asks for. If the caller left the
 * size open, smaller caches are tried before it gives up.
 */
export function makeRoom(
  manifest: Manifest,
  program: Program,
  plans: Plans,
  options: RoomOptions,
): Promise<Room> {
  return whatFits(manifest, program, MOST_BYTES, options, (plan) =>
    allocate(manifest, program, plans, plan, options),
  );
}

function allocate(
  manifest: Manifest,
  program: Program,
  plans: Plans,
  plan: MemoryPlan,
  { threads, shared }: RoomOptions,
): Room {
  const shapes = new Map(manifest.buffers.map((entry) => [entry.name, storedAs(entry, program).shape]));
  const all = Object.values(plans).flatMap((sizes) => [...sizes.values()]);
  const tables = new Tables(all, program, shapes, plan);
  const layout = layOut(manifest, program, plan, tables.bytes, threads);
  try {
    return { memory: makeMemory(layout.bytes, shared), plan, layout, tables };
  } catch (cause) {
    if (!(cause instanceof DeviceError)) throw cause;
    throw new DeviceError(
      `${cause.message} The weights take ${manifest.weights.bytes} of them, the KV cache ${plan.kvBytes} ` +
        `for ${plan.contextLength} tokens. Give createEngine a smaller kvMemory or contextLength, close other ` +
        "tabs, or use a smaller or more quantized model.",
      { code: cause.code, cause },
    );
  }
}
