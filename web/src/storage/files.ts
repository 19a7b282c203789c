/** Files in the browser's origin private file system, which all tabs of the origin share. */

/** Suffix of a file that is being written; it gets its name when it is complete. */
const PART = ".part";

/**
 * The locks of the origin; undefined in browsers from before 2022, where two tabs may interfere with each
 * other.
 */
export const { locks } = (globalThis.navigator ?? {}) as { readonly locks?: LockManager };

/** Changes an entry exclusively: while another tab changes the entry, it cannot be replaced or removed. */
export async function alone(name: string, work: () => Promise<void>): Promise<void> {
  if (!locks) return await work();
  await locks.request(`nearfar-file ${name}`, work);
}

/**
 * Stores a file completely or not at all: an entry exists before its bytes do, and another tab that reads it
 * meanwhile would find it corrupt and delete it. `durable`: the bytes should survive a crash of the machine.
 */
export async function store(
  directory: FileSystemDirectoryHandle,
  name: string,
  bytes: Uint8Array<ArrayBuffer>,
  durable = false,
): Promise<void> {
  const part = `${name}.${crypto.randomUUID()}${PART}`;
  const handle: MovableFileHandle = await directory.getFileHandle(part, { create: true });
  try {
    await write(handle, bytes, durable);
    await alone(name, async () => {
      if (handle.move) await handle.move(name);
      else await write(await directory.getFileHandle(name, { create: true }), bytes, durable);
    });
  } finally {
    await remove(directory, part);
  }
}

export async function read(
  directory: FileSystemDirectoryHandle,
  name: string,
): Promise<Uint8Array<ArrayBuffer> | null> {
  try {
    const handle = await directory.getFileHandle(name);
    return new Uint8Array(await (await handle.getFile()).arrayBuffer());
  } catch (error) {
    // The file cannot be read, because another tab has just deleted or replaced it.
    if (isNamed(error, "NotFoundError") || isNamed(error, "NotReadableError")) return null;
    throw error;
  }
}

export async function remove(directory: FileSystemDirectoryHandle, name: string): Promise<void> {
  try {
    await directory.removeEntry(name);
  } catch {
    // The file is gone already, or held open by another tab that is about to replace it.
  }
}

export async function namesIn(directory: FileSystemDirectoryHandle): Promise<string[]> {
  const names: string[] = [];
  for await (const name of directory.keys()) names.push(name);
  return names;
}

/**
 * Writes a file. Safari before 26 has no createWritable, but has the synchronous handle in workers, which
 * alone can flush.
 */
async function write(
  handle: FileSystemFileHandle,
  bytes: Uint8Array<ArrayBuffer>,
  durable: boolean,
): Promise<void> {
  if ("createWritable" in handle && !(durable && "createSyncAccessHandle" in handle)) {
    const stream = await handle.createWritable();
    try {
      await stream.write(bytes);
      await stream.close();
    } catch (error) {
      // The file is locked until the stream is aborted.
      await stream.abort().catch(() => undefined);
      throw error;
    }
    return;
  }
  const access = await (handle as unknown as SyncFileHandle).createSyncAccessHandle();
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

export function isNamed(error: unknown, name: string): boolean {
  return error instanceof DOMException && error.name === name;
}

/**
 * `move` renames a file within its directory and replaces a file of that name; TypeScript's types lack it.
 */
export interface MovableFileHandle extends FileSystemFileHandle {
  move?(name: string): Promise<void>;
}

/** A part of the worker's types, which cannot be loaded together with the window's. */
interface SyncFileHandle {
  createSyncAccessHandle(): Promise<{
    truncate(size: number): void;
    write(bytes: Uint8Array, options: { at: number }): number;
    flush(): void;
    close(): void;
  }>;
}
