import type { Manifest, Program } from "../../artifact/manifest.js";
import {
  bufferBytes,
  cacheBuffers,
  type MemoryOptions,
  type MemoryPlan,
  storedAs,
  whatFits,
} from "../device/memory.js";
import type { BufferRegistry } from "./buffers.js";
import type { DeviceBuffer, PageStore } from "./executor.js";

/** The memory of an executor beside the weights: cache, inputs, outputs, workspace. */
export interface WorkingMemory {
  readonly memory: MemoryPlan;
  readonly buffers: BufferRegistry;
  readonly named: ReadonlyMap<string, DeviceBuffer>;
  readonly cache: readonly PageStore[];
  readonly workspace: readonly GPUBuffer[];
}

/**
 * Allocates a cache of the size that the caller asks for. If the caller allows less, smaller caches are tried
 * before it gives up.
 */
export function allocateWhole(
  buffers: BufferRegistry,
  manifest: Manifest,
  program: Program,
  options: MemoryOptions,
): Promise<WorkingMemory> {
  const limit = buffers.device.limits.maxStorageBufferBindingSize;
  return whatFits(manifest, program, limit, options, (plan) => allocate(buffers, manifest, program, plan));
}

export function allocate(
  buffers: BufferRegistry,
  manifest: Manifest,
  program: Program,
  memory: MemoryPlan,
): Promise<WorkingMemory> {
  const advice =
    `Of this ${memory.kvBytes} bytes are KV cache for ${memory.contextLength} tokens: give ` +
    "createEngine a smaller kvMemory or contextLength.";
  return buffers.guarded("the cache and the workspace", advice, () => {
    const named = new Map<string, DeviceBuffer>();
    const { STORAGE, COPY_SRC, COPY_DST } = GPUBufferUsage;
    for (const entry of manifest.buffers) {
      const gpu = buffers.create(
        entry.name,
        bufferBytes(entry, program, memory),
        STORAGE | COPY_SRC | COPY_DST,
      );
      named.set(entry.name, { gpu, dtype: storedAs(entry, program).dtype });
    }
    const cache = cacheBuffers(manifest, program).flatMap(({ name, ...page }): PageStore[] => {
      const buffer = named.get(name);
      return buffer ? [{ gpu: buffer.gpu, ...page }] : [];
    });
    const workspace = program.workspace.map((bytes, i) => buffers.create(`workspace ${i}`, bytes, STORAGE));
    return { memory, buffers, named, cache, workspace };
  });
}
