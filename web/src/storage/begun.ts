import { alone, type MovableFileHandle, remove } from "./files.js";
import type { Part } from "./http.js";

/** The suffix of names of files that have come in part. */
export const BEGUN = ".begun";

/**
 * What of a file has come so far, on the disk while the rest is on its way: where the tab is closed meanwhile,
 * the next visit goes on from there.
 */
export class BegunFile {
  #size: number;
  #isOpen = true;

  private constructor(
    private readonly handle: MovableFileHandle,
    private readonly access: SyncAccess,
    private readonly forget: () => Promise<void>,
  ) {
    this.#size = access.getSize();
  }

  /** Null where files are written whole only, as everywhere but in workers of their own. */
  static async open(directory: FileSystemDirectoryHandle, name: string): Promise<BegunFile | null> {
    const part = `${name}${BEGUN}`;
    const handle: MovableFileHandle = await directory.getFileHandle(part, { create: true });
    const forget = (): Promise<void> => remove(directory, part);
    if ("createSyncAccessHandle" in handle)
      return new BegunFile(handle, await (handle as unknown as SyncFile).createSyncAccessHandle(), forget);
    await forget();
    return null;
  }

  /** What is there of a file of `size` bytes; undefined where nothing is. */
  read(size: number): Part | undefined {
    if (this.#size > size) this.clear();
    // Of a file that is there whole, the last byte is asked for once more: it is verified as any other.
    const received = Math.min(this.#size, size - 1);
    if (received <= 0) return undefined;
    const bytes = new Uint8Array(size);
    this.access.read(bytes.subarray(0, received), { at: 0 });
    return { bytes, received };
  }

  /** The download goes on from byte `received`: what is there beyond that is of another try. */
  goOnFrom(received: number): void {
    if (!this.#isOpen || this.#size <= received) return;
    this.access.truncate(received);
    this.#size = received;
  }

  /** Keeps the first `received` of `bytes`, of which it has those already that are there. */
  extend(bytes: Uint8Array<ArrayBuffer>, received: number): void {
    if (!this.#isOpen) return;
    try {
      this.#size += this.access.write(bytes.subarray(this.#size, received), { at: this.#size });
    } catch {
      // No room: the whole file will say so.
      void this.drop();
    }
  }

  /**
   * Gives the file its `name`, now that its bytes are verified: no byte is written twice. Whether it could:
   * where it is not whole, or files cannot be renamed, it is deleted.
   */
  async keep(name: string, size: number): Promise<boolean> {
    const { handle } = this;
    if (this.#isOpen && this.#size === size && handle.move) {
      try {
        this.#close();
        await alone(name, async () => handle.move?.(name));
        return true;
      } catch {
        // It is written anew.
      }
    }
    await this.drop();
    return false;
  }

  /** Lets go of the file, which stays for the next visit. */
  async close(): Promise<void> {
    if (!this.#isOpen) return;
    this.#close();
    if (this.#size === 0) await this.forget();
  }

  #close(): void {
    this.#isOpen = false;
    this.access.close();
  }

  /** Deletes it. */
  async drop(): Promise<void> {
    await this.close();
    await this.forget();
  }

  /** Forgets what is there, which is of no use. */
  clear(): void {
    this.goOnFrom(0);
  }
}

/** Part of the worker's types, which cannot be loaded beside those of the window. */
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
