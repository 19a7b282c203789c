import { DeviceError, RequestError } from "../../both/errors.js";
import { type BufferEntry, type Dim, DTYPE_BYTES, type Manifest, type Program } from "../../both/manifest.js";

/** What the caller may fix about the cache. */
export interface MemoryOptions {
  /** Bytes for the KV cache of all sequences. */
  readonly kvMemory?: number | undefined;
  /** Tokens that one sequence can have; the model's own limit by default. */
  readonly contextLength?: number | undefined;
}

export interface MemoryPlan {
  readonly pages: number;
  readonly contextLength: number;
  readonly kvBytes: number;
}

/** Browsers do not tell how much GPU memory is free; half a GiB is what phones can spare beside a small model. */
export const DEFAULT_KV_MEMORY = 512 * 2 ** 20;

/** Bytes of a buffer once the runtime's symbols have values. */
export function bufferBytes(
  { dtype, shape }: BufferEntry,
  program: Program,
  symbols: Record<Extract<Dim, string>, number>,
): number {
  const element = DTYPE_BYTES[dtype === "kv" ? program.kvDtype : dtype];
  return shape.reduce<number>((bytes, dim) => bytes * (typeof dim === "number" ? dim : symbols[dim]), element);
}

/** Bytes of one page in each buffer of the cache. */
export function pageBytes(manifest: Manifest, program: Program): number[] {
  const caches = manifest.buffers.filter((buffer) => buffer.dtype === "kv");
  return caches.map((buffer) => bufferBytes(buffer, program, { pages: 1, context: 1 }));
}

/** How many pages fit the budget and the device's limit on one buffer, and how long a sequence may be with them. */
export function planMemory(
  manifest: Manifest,
  program: Program,
  maxBinding: number,
  options: MemoryOptions,
): MemoryPlan {
  const { pageSize, slots } = manifest.cache;
  const most = manifest.model.contextLength;
  const asked = options.contextLength ?? most;
  if (!Number.isSafeInteger(asked) || asked < 1 || asked > most)
    throw new RequestError(`contextLength is ${asked}; this model takes 1 to ${most} tokens.`, "contextLength");
  const budget = options.kvMemory ?? DEFAULT_KV_MEMORY;
  if (!(budget > 0)) throw new RequestError(`kvMemory is ${budget}; give a number of bytes above 0.`, "kvMemory");

  const parts = pageBytes(manifest, program);
  const page = parts.reduce((sum, bytes) => sum + bytes, 0);
  const perSequence = Math.ceil(asked / pageSize);
  const byLimit = Math.floor(maxBinding / Math.max(...parts));
  const pages = Math.min(Math.floor(budget / page), byLimit, slots * perSequence);
  const needed = options.contextLength === undefined ? 1 : perSequence;
  if (pages < needed)
    throw new DeviceError(
      `A context of ${Math.min(asked, needed * pageSize)} tokens needs ${needed * page} bytes of KV cache; ` +
        `there is room for ${pages * pageSize} tokens (kvMemory ${budget} bytes, ${byLimit} pages by the GPU's buffer limit). ` +
        "Give more kvMemory or a smaller contextLength.",
    );
  return { pages, contextLength: Math.min(asked, pages * pageSize), kvBytes: pages * page };
}
