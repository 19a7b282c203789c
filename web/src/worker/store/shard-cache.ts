import { sha256Hex } from "../../both/http.js";
import { alone, isNamed, locks, namesIn, read, remove, store } from "./files.js";

/**
 * Where verified shards stay between visits. Keyed by SHA-256, so artifacts that share a shard share its
 * copy.
 */
export interface ShardCache {
  /** Null where the shard is not cached. */
  get(sha256: string): Promise<Uint8Array<ArrayBuffer> | null>;
  put(sha256: string, bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  delete(sha256: string): Promise<void>;
}

const SHARDS = "nearfar-shards";
const LISTS = "nearfar-lists";
/** Held by all who write, and alone by who sweeps, over all tabs of the origin. */
const LOCK = "nearfar-shards";

/** Which shards an artifact is made of, so that those of its last build can go. */
interface ShardList {
  readonly shards: readonly string[];
  /** When it was last loaded; milliseconds since 1970. */
  readonly used: number;
}

/**
 * The origin private file system of the browser for the artifact at `url`, whose shards are `shards`; null
 * where it is missing (private windows, old browsers). Shards that no artifact of this origin is made of any
 * more are deleted.
 */
export async function openOpfsCache(url: URL, shards: readonly string[]): Promise<ShardCache | null> {
  try {
    const root = await navigator.storage.getDirectory();
    const [files, lists] = await Promise.all(
      [SHARDS, LISTS].map((name) => root.getDirectoryHandle(name, { create: true })),
    );
    if (!files || !lists) return null;
    const name = await sha256Hex(new TextEncoder().encode(url.href));
    const cache = new OpfsCache(files, lists, name);
    await cache.claim(shards).catch(() => undefined);
    return cache;
  } catch {
    return null;
  }
}

class OpfsCache implements ShardCache {
  constructor(
    private readonly files: FileSystemDirectoryHandle,
    private readonly lists: FileSystemDirectoryHandle,
    /** Of the list of the artifact that is being loaded. */
    private readonly list: string,
  ) {}

  /** Says which shards the artifact needs, and deletes those that nobody does. */
  async claim(shards: readonly string[]): Promise<void> {
    const list: ShardList = { shards, used: Date.now() };
    const bytes = new TextEncoder().encode(JSON.stringify(list));
    await locked("shared", () => store(this.lists, this.list, bytes));
    await this.#sweep();
  }

  get(sha256: string): Promise<Uint8Array<ArrayBuffer> | null> {
    return read(this.files, sha256);
  }

  async put(sha256: string, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    const write = (): Promise<void> => locked("shared", () => store(this.files, sha256, bytes));
    try {
      await write();
    } catch (error) {
      // The room that other artifacts take is given to the one that is wanted now, the longest unused first.
      if (!isNamed(error, "QuotaExceededError") || !(await this.#forgetOldest())) throw error;
      await write();
    }
  }

  delete(sha256: string): Promise<void> {
    return locked("shared", () => alone(sha256, () => remove(this.files, sha256)));
  }

  /**
   * Deletes the shards of no list, and what a closed tab has left half written. Another time where a tab is
   * writing.
   */
  async #sweep(): Promise<void> {
    await locked("exclusive", async () => {
      const lists = await this.#readLists();
      const wanted = new Set([...lists.values()].flatMap(({ shards }) => shards));
      for (const name of await namesIn(this.files)) if (!wanted.has(name)) await remove(this.files, name);
      for (const name of await namesIn(this.lists)) if (!lists.has(name)) await remove(this.lists, name);
    });
  }

  /** Whether there was another artifact to give up. */
  async #forgetOldest(): Promise<boolean> {
    const others = [...(await this.#readLists())].filter(([name]) => name !== this.list);
    const [oldest] = others.sort(([, a], [, b]) => a.used - b.used);
    if (!oldest) return false;
    await locked("shared", () => remove(this.lists, oldest[0]));
    await this.#sweep();
    return true;
  }

  /** By name; what is no list is left out. */
  async #readLists(): Promise<Map<string, ShardList>> {
    const lists = new Map<string, ShardList>();
    for (const name of await namesIn(this.lists)) {
      const list = parseList(await read(this.lists, name));
      if (list) lists.set(name, list);
    }
    return lists;
  }
}

function parseList(bytes: Uint8Array<ArrayBuffer> | null): ShardList | null {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes ?? new Uint8Array()));
    const { shards, used } = value as Partial<Record<keyof ShardList, unknown>>;
    const isList = Array.isArray(shards) && shards.every((name) => typeof name === "string");
    return isList && typeof used === "number" ? { shards, used } : null;
  } catch {
    return null;
  }
}

/**
 * Runs `work` under the lock that all tabs of the origin share; exclusively only where nobody holds it, else
 * not at all.
 */
async function locked(mode: LockMode, work: () => Promise<void>): Promise<void> {
  if (!locks) return mode === "shared" ? await work() : undefined;
  await locks.request(LOCK, { mode, ifAvailable: mode === "exclusive" }, (lock) =>
    lock ? work() : undefined,
  );
}
