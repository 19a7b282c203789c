import { DeviceError, RequestError } from "../../both/errors.js";
import { DTYPE_BYTES } from "../../both/format.js";
import type { BufferEntry, Dim, Manifest, Program } from "../../both/manifest.js";

/** What the caller may fix about the cache. */
export interface MemoryOptions {
  /** Bytes for the KV cache of all sequences. */
  readonly kvMemory?: number | undefined;
  /** Tokens that one sequence can have; the model's own limit by default. */
  readonly contextLength?: number | undefined;
}

export interface MemoryPlan {
  /** Of each group. */
  readonly pages: readonly number[];
  readonly contextLength: number;
  readonly kvBytes: number;
}

/** Browsers do not tell how much GPU memory is free; half a GiB is what phones can spare beside a small model. */
export const DEFAULT_KV_MEMORY = 512 * 2 ** 20;

/** What the runtime chooses: pages of each group, positions that it has room for. */
export type Extents = Pick<MemoryPlan, "pages" | "contextLength">;

/** Bytes of a buffer once what the runtime chooses is chosen. */
export function bufferBytes({ dtype, shape }: BufferEntry, program: Program, extents: Extents): number {
  const element = DTYPE_BYTES[dtype === "kv" ? program.kvDtype : dtype];
  return shape.reduce<number>((bytes, dim) => bytes * extentOf(dim, extents), element);
}

function extentOf(dim: Dim, { pages, contextLength }: Extents): number {
  if (typeof dim === "number") return dim;
  return dim === "context" ? contextLength : (pages[groupIn(dim)] ?? 0);
}

/** The group whose pages an extent stands for. */
function groupIn(dim: `pages.${number}`): number {
  return Number(dim.slice("pages.".length));
}

/** The buffers of the cache, with the bytes of a page in each and the group whose pages they have. */
export function cacheBuffers({ buffers, groups }: Manifest, program: Program): CacheBuffer[] {
  const one: Extents = { pages: groups.map(() => 1), contextLength: 1 };
  return buffers.flatMap((entry) => {
    const [pages] = entry.shape;
    if (entry.dtype !== "kv" || typeof pages !== "string" || pages === "context") return [];
    return [{ name: entry.name, group: groupIn(pages), pageBytes: bufferBytes(entry, program, one) }];
  });
}

export interface CacheBuffer {
  readonly name: string;
  readonly group: number;
  readonly pageBytes: number;
}

/** How many pages (of every group as many) fit the budget and the device's limit on one buffer, and how long a sequence may be with them. */
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

  const parts = cacheBuffers(manifest, program).map(({ pageBytes }) => pageBytes);
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
  return {
    pages: manifest.groups.map(() => pages),
    contextLength: Math.min(asked, pages * pageSize),
    kvBytes: pages * page,
  };
}
