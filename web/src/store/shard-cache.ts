/** Where verified shards stay between visits. Keyed by SHA-256, so artifacts that share a shard share its copy. */
export interface ShardCache {
  /** Null where the shard is not cached. */
  get(sha256: string): Promise<Uint8Array<ArrayBuffer> | null>;
  put(sha256: string, bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  delete(sha256: string): Promise<void>;
}

const DIRECTORY = "nearfar-shards";

/** The origin private file system of the browser, or null where it is missing (private windows, old browsers). */
export async function openOpfsCache(): Promise<ShardCache | null> {
  try {
    const root = await navigator.storage.getDirectory();
    return new OpfsCache(await root.getDirectoryHandle(DIRECTORY, { create: true }));
  } catch {
    return null;
  }
}

class OpfsCache implements ShardCache {
  constructor(private readonly directory: FileSystemDirectoryHandle) {}

  async get(sha256: string): Promise<Uint8Array<ArrayBuffer> | null> {
    try {
      const handle = await this.directory.getFileHandle(sha256);
      return new Uint8Array(await (await handle.getFile()).arrayBuffer());
    } catch (error) {
      if (error instanceof DOMException && error.name === "NotFoundError") return null;
      throw error;
    }
  }

  async put(sha256: string, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    const handle = await this.directory.getFileHandle(sha256, { create: true });
    try {
      await write(handle, bytes);
    } catch (error) {
      // A file cut short would be found corrupt at the next visit; better none.
      await this.delete(sha256);
      throw error;
    }
  }

  async delete(sha256: string): Promise<void> {
    try {
      await this.directory.removeEntry(sha256);
    } catch {
      // Gone already, or held open by another tab that is about to replace it.
    }
  }
}

/** Safari before 26 has no createWritable, but in workers the synchronous handle. */
async function write(handle: FileSystemFileHandle, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
  if ("createWritable" in handle) {
    const stream = await handle.createWritable();
    await stream.write(bytes);
    await stream.close();
    return;
  }
  const access = await (handle as SyncFileHandle).createSyncAccessHandle();
  try {
    access.truncate(0);
    const written = access.write(bytes, { at: 0 });
    if (written !== bytes.length)
      throw new DOMException(`${written} of ${bytes.length} bytes written`, "QuotaExceededError");
    access.flush();
  } finally {
    access.close();
  }
}

/** Part of the worker's types, which cannot be loaded beside those of the window. */
interface SyncFileHandle {
  createSyncAccessHandle(): Promise<{
    truncate(size: number): void;
    write(bytes: Uint8Array, options: { at: number }): number;
    flush(): void;
    close(): void;
  }>;
}
