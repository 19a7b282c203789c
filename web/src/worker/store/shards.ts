import type { FileEntry } from "../../artifact/manifest.js";
import { ArtifactError, type ErrorCode, linkedAbort, throwIfAborted } from "../../protocol/errors.js";
import type { BegunFile } from "../../storage/begun.js";
import type { FileCache } from "../../storage/file-cache.js";
import { type DownloadOptions, download, sha256Hex, within } from "../../storage/http.js";
import { type Downloaded, keptOr } from "./kept-file.js";

/** Progress of the shards in bytes; `cached` of the `loaded` ones came from the browser's storage. */
export interface ShardProgress {
  readonly loaded: number;
  readonly cached: number;
  readonly verified: number;
  /** Bytes that the caller has finished uploading. */
  readonly uploaded: number;
  readonly total: number;
}

export interface ShardOptions extends Pick<DownloadOptions, "fetch" | "signal"> {
  readonly cache: FileCache | null;
  readonly onProgress?: ((progress: ShardProgress) => void) | undefined;
  readonly onWarning?: ((message: string) => void) | undefined;
}

/**
 * Yields the shards in order, each verified. Two are loaded at a time, so that one comes while the other is
 * verified, or one is loaded while the caller uses one: at most two are in memory.
 */
export async function* streamShards(
  base: URL,
  shards: readonly FileEntry[],
  options: ShardOptions,
): AsyncGenerator<Uint8Array<ArrayBuffer>> {
  const store = new ShardStore(base, shards, options);
  const { signal, stop } = linkedAbort(options.signal);
  const start = (shard: FileEntry | undefined): Promise<Uint8Array<ArrayBuffer>> | undefined => {
    const loading = shard && store.load(shard, signal);
    // The load of the next shard may fail while the caller still uses the one before; its rejection is
    // handled when it is awaited.
    loading?.catch(() => undefined);
    return loading;
  };
  let [next, after] = [start(shards[0]), start(shards[1])];
  try {
    for (let i = 2; next; i++) {
      const bytes: Uint8Array<ArrayBuffer> = await next;
      yield bytes;
      store.used(bytes.length);
      next = after;
      after = start(shards[i]);
    }
  } finally {
    // The caller may stop early, while a download is in progress.
    stop();
  }
}

/** The number of broken connections after which the download fails. */
const TRIES = 8;

class ShardStore {
  readonly #received = new Map<FileEntry, number>();
  readonly #total: number;
  #cache: FileCache | null;
  #cachedBytes = 0;
  #verified = 0;
  #uploaded = 0;

  constructor(
    private readonly base: URL,
    shards: readonly FileEntry[],
    private readonly options: ShardOptions,
  ) {
    this.#total = shards.reduce((sum, shard) => sum + shard.bytes, 0);
    this.#cache = options.cache;
  }

  async load(shard: FileEntry, signal: AbortSignal): Promise<Uint8Array<ArrayBuffer>> {
    const { bytes, cached } = await keptOr(
      shard,
      { cache: this.#cache, signal },
      () => this.#fromNetwork(shard, signal),
      {
        onCorrupt: () => this.#warn(`The cached copy of ${shard.file} is corrupt; downloading it again.`),
        onFailure: (error) => this.#giveUpCache(error),
      },
    );
    if (cached) this.#cachedBytes += shard.bytes;
    this.#verified += shard.bytes;
    this.#report(shard, shard.bytes);
    return bytes;
  }

  /** Counts bytes that the caller has finished using. */
  used(bytes: number): void {
    this.#uploaded += bytes;
    this.#tell();
  }

  /**
   * Downloads a shard with several tries. If a connection breaks, the received part is kept; a server that
   * sends wrong bytes twice has a wrong file.
   */
  async #fromNetwork(shard: FileEntry, signal: AbortSignal): Promise<Downloaded> {
    const begun = (await this.#cache?.begun?.(shard.sha256).catch(() => null)) ?? null;
    try {
      return { bytes: await this.#download(shard, begun, signal), begun };
    } catch (error) {
      await begun?.close();
      throw error;
    }
  }

  async #download(
    shard: FileEntry,
    kept: BegunFile | null,
    signal: AbortSignal,
  ): Promise<Uint8Array<ArrayBuffer>> {
    const url = within(this.base, shard.file);
    const { fetch } = this.options;
    let problem = "";
    let code: ErrorCode = "artifact-damaged";
    let begun = kept?.read(shard.bytes);
    for (let [attempt, wrong] = [0, 0]; wrong < 2 && attempt < TRIES; attempt++) {
      const options: DownloadOptions = {
        fetch,
        signal,
        // The HTTP cache is not used, because storing shards twice would halve what fits in the origin's
        // quota.
        cache: attempt > 0 ? "reload" : this.#cache ? "no-store" : "default",
        onStart: (received) => kept?.goOnFrom(received),
        onBytes: (received, bytes) => {
          kept?.extend(bytes, received);
          this.#report(shard, received);
        },
      };
      const result = await download(url, shard.bytes, options, begun);
      if (result.ok) {
        const sha256 = await sha256Hex(result.bytes);
        if (sha256 === shard.sha256) return result.bytes;
        begun = undefined;
        kept?.clear();
        wrong += 1;
        code = "artifact-damaged";
        problem = `${url.href} is corrupt: its SHA-256 is ${sha256}, manifest.json states ${shard.sha256}`;
      } else {
        problem = result.problem;
        code = result.code;
        if (!result.retry) break;
        // A try that brought no new bytes counts as a wrong one. Then the whole file is requested, because
        // older browsers first ask whether a range is allowed, which not every server answers.
        if ((result.part?.received ?? 0) <= (begun?.received ?? 0)) wrong += 1;
        begun = result.part?.received ? result.part : undefined;
      }
      throwIfAborted(signal);
    }
    const remedy = code === "unreachable" ? "Try again later." : "Upload or build the artifact again.";
    throw new ArtifactError(`The weight shard ${shard.file} cannot be loaded. ${problem}. ${remedy}`, {
      code,
    });
  }

  /** Stops using the cache, with one warning: the model runs without it too. */
  #giveUpCache(error: unknown): void {
    if (!this.#cache) return;
    this.#cache = null;
    this.#warn(
      `The weights cannot be kept in the browser's storage (${error}); the next visit downloads them again.`,
    );
  }

  #report(shard: FileEntry, received: number): void {
    this.#received.set(shard, received);
    this.#tell();
  }

  #tell(): void {
    let loaded = 0;
    for (const bytes of this.#received.values()) loaded += bytes;
    this.options.onProgress?.({
      loaded,
      cached: this.#cachedBytes,
      verified: this.#verified,
      uploaded: this.#uploaded,
      total: this.#total,
    });
  }

  #warn(message: string): void {
    this.options.onWarning?.(message);
  }
}
