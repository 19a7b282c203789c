import { throwIfAborted } from "../../protocol/errors.js";
import type { BegunFile } from "../../storage/begun.js";
import type { FileCache } from "../../storage/file-cache.js";
import { locks } from "../../storage/files.js";
import { type DownloadOptions, fetchBytes, sha256Hex, within } from "../../storage/http.js";

/** A file of an artifact, by its path and SHA-256. */
export interface Wanted {
  readonly file: string;
  readonly sha256: string;
}

export interface KeptOptions extends Pick<DownloadOptions, "fetch" | "signal"> {
  readonly cache?: FileCache | null | undefined;
}

/** A verified file from the network. */
export interface Downloaded {
  readonly bytes: Uint8Array<ArrayBuffer>;
  /** The file in which the bytes are stored already. */
  readonly begun?: BegunFile | null;
}

export interface Hooks {
  /** Called if the copy was wrong; it has been deleted. */
  readonly onCorrupt?: () => void;
  /** Called if the cache cannot be read or written; the file then comes from its server. */
  readonly onFailure?: (error: unknown) => void;
}

/**
 * Returns a verified file: the copy in `cache`, or the download, which is then stored. If several tabs want
 * the same file, one downloads it and the others wait for its copy.
 */
export async function keptOr(
  wanted: Wanted,
  { cache, signal }: KeptOptions,
  download: () => Promise<Downloaded>,
  hooks: Hooks = {},
): Promise<{ readonly bytes: Uint8Array<ArrayBuffer>; readonly cached: boolean }> {
  const copy = async (): Promise<Uint8Array<ArrayBuffer> | null> => {
    try {
      const bytes = (await cache?.get(wanted.sha256)) ?? null;
      if (bytes === null || (await sha256Hex(bytes)) === wanted.sha256) return bytes;
      hooks.onCorrupt?.();
      await cache?.delete(wanted.sha256);
    } catch (error) {
      hooks.onFailure?.(error);
    }
    return null;
  };
  const found = await copy();
  throwIfAborted(signal);
  if (found) return { bytes: found, cached: true };
  const fresh = async (late?: Uint8Array<ArrayBuffer> | null) => {
    throwIfAborted(signal);
    return { bytes: late ?? (await keep(cache, wanted, await download(), hooks)), cached: !!late };
  };
  if (!cache || !locks) return fresh();
  const lock = `nearfar-download ${wanted.sha256}`;
  return locks.request(lock, signal ? { signal } : {}, async () => fresh(await copy()));
}

async function keep(
  cache: FileCache | null | undefined,
  { sha256 }: Wanted,
  { bytes, begun = null }: Downloaded,
  { onFailure }: Hooks,
): Promise<Uint8Array<ArrayBuffer>> {
  try {
    await cache?.put(sha256, bytes, begun);
  } catch (error) {
    onFailure?.(error);
    // Another tab cannot open the file while it is open here.
    await begun?.close();
  }
  return bytes;
}

/** Returns a small file of the artifact at `base`, from the cache or the network. */
export async function keptBytes(
  base: URL,
  wanted: Wanted,
  options: KeptOptions,
): Promise<Uint8Array<ArrayBuffer>> {
  const { fetch, signal } = options;
  const download = async (): Promise<Downloaded> => ({
    bytes: await fetchBytes(within(base, wanted.file), wanted.sha256, { fetch, signal }),
  });
  return (await keptOr(wanted, options, download)).bytes;
}
