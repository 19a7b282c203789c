import { alone, type MovableFileHandle, remove } from "./files.js";
import type { PartialDownload } from "./http.js";

/** Suffix of the names of partly downloaded files. */
export const BEGUN = ".begun";

/**
 * Milliseconds after which bytes that have come are written. In private windows each write is a message to
 * another process: 500 MB took 5.1 s in pieces of 64 kB, as they come from the network, and 2 s in larger ones.
 */
const WRITE_MS = 50;

/**
 * The part of a file that has come so far, on the disk during the download: if the tab is closed, the next
 * visit continues from there.
 */
export class BegunFile {
  #size: number;
  #isOpen = true;
  /** Bytes that have come and are not written yet. */
  #waiting: Uint8Array<ArrayBuffer> | null = null;

  private constructor(
    private readonly handle: MovableFileHandle,
    private readonly access: SyncAccess,
    private readonly forget: () => Promise<void>,
  ) {
    this.#size = access.getSize();
  }

  /**
   * Opens a partly downloaded file; null where files can only be written whole, as everywhere except in
   * dedicated workers.
   */
  static async open(directory: FileSystemDirectoryHandle, name: string): Promise<BegunFile | null> {
    const part = `${name}${BEGUN}`;
    const handle: MovableFileHandle = await directory.getFileHandle(part, { create: true });
    const forget = (): Promise<void> => remove(directory, part);
    if ("createSyncAccessHandle" in handle)
      return new BegunFile(handle, await (handle as unknown as SyncFile).createSyncAccessHandle(), forget);
    await forget();
    return null;
  }

  /** Reads the part of a file of `size` bytes; undefined where there is none. */
  read(size: number): PartialDownload | undefined {
    if (this.#size > size) this.clear();
    // For a complete file, the last byte is requested once more, so that it is verified as any other.
    const received = Math.min(this.#size, size - 1);
    if (received <= 0) return undefined;
    const bytes = new Uint8Array(size);
    this.access.read(bytes.subarray(0, received), { at: 0 });
    return { bytes, received };
  }

  /** Continues the download from byte `received`; later bytes on the disk are from another try. */
  goOnFrom(received: number): void {
    this.#waiting = null;
    if (!this.#isOpen || this.#size <= received) return;
    this.access.truncate(received);
    this.#size = received;
  }

  /** Stores the first `received` of `bytes` soon; some of them are on the disk already. */
  extend(bytes: Uint8Array<ArrayBuffer>, received: number): void {
    if (!this.#waiting) setTimeout(() => this.#write(), WRITE_MS);
    this.#waiting = bytes.subarray(this.#size, received);
  }

  #write(): void {
    const bytes = this.#waiting;
    this.#waiting = null;
    if (!this.#isOpen || !bytes) return;
    try {
      this.#size += this.access.write(bytes, { at: this.#size });
    } catch {
      // The storage is full: storing the whole file will report it.
      void this.drop();
    }
  }

  /**
   * Renames the verified file to `name`, so that no byte is written twice. Returns whether it could; an
   * incomplete file, or one that cannot be renamed, is deleted.
   */
  async keep(name: string, size: number): Promise<boolean> {
    const { handle } = this;
    this.#write();
    if (this.#isOpen && this.#size === size && handle.move) {
      try {
        this.#close();
        await alone(name, async () => handle.move?.(name));
        return true;
      } catch {
        // The file could not be renamed, so it is written again.
      }
    }
    await this.drop();
    return false;
  }

  /** Closes the file, which stays for the next visit. */
  async close(): Promise<void> {
    this.#write();
    if (!this.#isOpen) return;
    this.#close();
    if (this.#size === 0) await this.forget();
  }

  #close(): void {
    this.#isOpen = false;
    this.access.close();
  }

  /** Deletes the partly downloaded file. */
  async drop(): Promise<void> {
    await this.close();
    await this.forget();
  }

  /** Discards the stored bytes, which are of no use. */
  clear(): void {
    this.goOnFrom(0);
  }
}

/** A part of the worker's types, which cannot be loaded together with the window's. */
interface SyncAccess {
  getSize(): number;
  read(into: Uint8Array, options: { at: number }): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  truncate(size: number): void;
  close(): void;
}

interface SyncFile {
  createSyncAccessHandle(): Promise<SyncAccess>;
}
