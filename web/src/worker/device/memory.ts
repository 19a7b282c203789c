import type { BufferEntry, Dim, Dtype, Manifest, Program } from "../../artifact/manifest.js";
import { DTYPE_BYTES, KV_BITS, KV_GROUPS, MAX_STEP } from "../../format/constants.js";
import { ArtifactError, DeviceError, RequestError } from "../../protocol/errors.js";
import { Window } from "../cache/window.js";

/** The caller's limits for the cache. */
export interface MemoryOptions {
  /** Bytes for the KV cache of all sequences; by default as much as AT_FIRST sequences need. */
  readonly kvMemory?: number | undefined;
  /**
   * Whether a smaller cache is accepted if memory does not suffice; by default it is if `kvMemory` is not
   * given.
   */
  readonly orLess?: boolean | undefined;
  /** Tokens that one sequence can have; the model's own limit by default. */
  readonly contextLength?: number | undefined;
}

export interface MemoryPlan {
  /** The number of pages of each group. */
  readonly pages: readonly number[];
  readonly contextLength: number;
  readonly kvBytes: number;
}

/**
 * Sequences of the default cache: a conversation with the whole context, and one more, since a page rarely
 * has more.
 */
const AT_FIRST = 2;

/**
 * Browsers do not report free GPU memory; half a GiB is what phones can spare in addition to a small model.
 * The default cache is never larger.
 */
export const DEFAULT_KV_MEMORY = 512 * 2 ** 20;

/** The runtime's choices: pages of each group, and positions that fit. */
export type Extents = Pick<MemoryPlan, "pages" | "contextLength">;

/** A buffer's dtype and shape in a program, as `nearfar.format.kv` has them. */
export interface Stored {
  readonly dtype: Dtype;
  readonly shape: readonly Dim[];
}

/** How a program stores a buffer: rows of a quantized cache are words of codes, scales and offsets. */
export function storedAs({ dtype, shape }: BufferEntry, { kvDtype }: Program): Stored {
  if (dtype !== "kv") return { dtype, shape };
  if (kvDtype !== "int8" && kvDtype !== "int4") return { dtype: kvDtype, shape };
  const headDim = Number(shape.at(-1));
  const group = KV_GROUPS[kvDtype].find((size) => headDim % size === 0);
  if (group === undefined)
    throw new ArtifactError(
      `Heads of ${headDim} values cannot be in a cache of ${kvDtype}. Build the artifact again.`,
    );
  const words = (headDim * KV_BITS[kvDtype]) / 32 + headDim / group;
  return { dtype: "uint32", shape: [...shape.slice(0, -1), words] };
}

/** Bytes of a buffer for the runtime's choices. */
export function bufferBytes(entry: BufferEntry, program: Program, extents: Extents): number {
  const { dtype, shape } = storedAs(entry, program);
  const element = DTYPE_BYTES[dtype];
  return shape.reduce<number>((bytes, dim) => bytes * extentOf(dim, extents), element);
}

/** An extent as a number, for the runtime's choices. */
export function extentOf(dim: Dim, { pages, contextLength }: Extents): number {
  if (typeof dim === "number") return dim;
  return dim === "context" ? contextLength : (pages[groupIn(dim)] ?? 0);
}

/** The group for whose pages an extent stands. */
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

/** The assumed tokens of a conversation beside a long one; most conversations stay below. */
const TYPICAL = 4096;

/**
 * How many pages of each group fit the budget and the device's limit on one buffer, and how long a sequence
 * may be.
 */
export function planMemory(
  manifest: Manifest,
  program: Program,
  maxBinding: number,
  options: MemoryOptions,
): MemoryPlan {
  const { pageSize } = manifest.cache;
  const most = manifest.model.contextLength;
  const asked = options.contextLength ?? most;
  if (!Number.isSafeInteger(asked) || asked < 1 || asked > most)
    throw new RequestError(
      `contextLength is ${asked}; this model takes 1 to ${most} tokens.`,
      "contextLength",
    );
  const budget = options.kvMemory ?? DEFAULT_KV_MEMORY;
  if (!(budget > 0))
    throw new RequestError(`kvMemory is ${budget}; give a number of bytes above 0.`, "kvMemory");

  const pools = poolsOf(manifest, program, maxBinding, asked);
  const sequences = options.kvMemory === undefined ? AT_FIRST : null;
  const pages = sharePages(manifest, pools, { context: asked, budget, most: sequences });
  const longest = pools.map(({ window }, group) => window.longest(pages[group] ?? 0, MAX_STEP, asked));
  const contextLength = Math.min(...longest);
  const needed = options.contextLength === undefined ? Math.min(asked, pageSize) : asked;
  if (contextLength < needed) {
    const bytes = bytesOf(pools, ({ mostPages }) => Math.min(mostPages, Math.ceil(needed / pageSize)));
    const byLimit = Math.min(...pools.map(({ limit }) => limit));
    throw new DeviceError(
      `A context of ${needed} tokens needs ${bytes} bytes of KV cache; there is room for ${contextLength} ` +
        `tokens (kvMemory ${budget} bytes, ${byLimit} pages at most in one buffer). Give more kvMemory ` +
        "or a smaller contextLength.",
      { code: "out-of-memory" },
    );
  }
  return { pages, contextLength, kvBytes: bytesOf(pools, (_, group) => pages[group] ?? 0) };
}

/** A group of caches before it has its pages. */
interface Pool {
  readonly window: Window;
  /** Bytes of one page, all caches together. */
  readonly pageBytes: number;
  /** The most pages that one sequence can need. */
  readonly mostPages: number;
  /** The most pages that the device can hold in one buffer, and that would not lie idle. */
  readonly limit: number;
}

function poolsOf(manifest: Manifest, program: Program, maxBinding: number, context: number): Pool[] {
  const { pageSize, slots } = manifest.cache;
  const parts = cacheBuffers(manifest, program);
  return manifest.groups.map(({ window: size }, group) => {
    const own = parts.filter((part) => part.group === group).map(({ pageBytes }) => pageBytes);
    const window = new Window(size, pageSize);
    const mostPages = window.mostColumns(MAX_STEP, context);
    // As many pages of windows again as the slots need, for prefixes that no sequence uses at the moment.
    const whole = slots * Math.ceil(context / pageSize);
    const useful = size === null ? whole : Math.min(2 * slots * mostPages, whole);
    const limit = Math.min(useful, Math.floor(maxBinding / Math.max(...own)));
    return { window, mostPages, limit, pageBytes: own.reduce((sum, bytes) => sum + bytes, 0) };
  });
}

/**
 * The pages of each group for `budget` bytes. A window must not shorten the context, so a first sequence gets
 * its windows and as much of the rest as the model or the budget allows. Then groups should run out together:
 * further sequences get their windows and the pages for TYPICAL tokens in the group without a window, until
 * all slots have them, and as many again for prefixes that are kept. The rest goes to the first group, which
 * has no window, or the widest. `most` limits the number of sequences, and then the rest is not used. The
 * Python runtime does the same (edge_runtime/artifact/budget.py).
 */
function sharePages(
  { cache }: Manifest,
  pools: readonly Pool[],
  { context, budget, most }: { context: number; budget: number; most: number | null },
): number[] {
  const typical = Math.ceil(Math.min(TYPICAL, context) / cache.pageSize);
  const of = (sequences: number, columns: number): number[] =>
    pools.map(({ window, mostPages, limit }) => {
      const wanted =
        window.size === null ? columns + (sequences - 1) * typical : sequences * Math.min(mostPages, columns);
      return Math.min(wanted, limit);
    });
  const takes = (pages: readonly number[]): number => bytesOf(pools, (_, group) => pages[group] ?? 0);
  const columns = largest(Math.ceil(context / cache.pageSize), (n) => takes(of(1, n)) <= budget);
  const sequences = largest(most ?? 2 * cache.slots, (n) => takes(of(n, columns)) <= budget);
  const pages = of(Math.max(sequences, 1), columns);
  if (most !== null) return pages;
  const spare = Math.floor(Math.max(budget - takes(pages), 0) / (pools[0]?.pageBytes ?? 1));
  return pages.map((count, group) => (group === 0 ? Math.min(count + spare, pools[0]?.limit ?? 0) : count));
}

function bytesOf(pools: readonly Pool[], pages: (pool: Pool, group: number) => number): number {
  return pools.reduce((sum, pool, group) => sum + pool.pageBytes * pages(pool, group), 0);
}

/** The largest number up to `most` that fits, if all smaller ones fit too; 0 if 1 does not. */
function largest(most: number, fits: (count: number) => boolean): number {
  let [low, high] = [0, most];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}

/**
 * The result of `allocate` for a plan with as much cache as the caller asks for. If the caller left the size
 * open (or set `orLess`), smaller caches are tried before it gives up.
 */
export async function whatFits<Made>(
  manifest: Manifest,
  program: Program,
  maxBinding: number,
  options: MemoryOptions,
  allocate: (plan: MemoryPlan) => Made | Promise<Made>,
): Promise<Made> {
  const { orLess = options.kvMemory === undefined, contextLength } = options;
  const kvMemory = options.kvMemory ?? planMemory(manifest, program, maxBinding, { contextLength }).kvBytes;
  let first: unknown = null;
  for (let budget = kvMemory; ; budget = Math.floor(budget / 2)) {
    try {
      const plan = planMemory(manifest, program, maxBinding, { contextLength, kvMemory: budget });
      return await allocate(plan);
    } catch (error) {
      // The first error names the missing memory; later errors name budgets that the caller did not set.
      first ??= error;
      const isLeast = !orLess || budget <= kvMemory / 32;
      if (!(error instanceof DeviceError) || isLeast) throw first;
    }
  }
}
