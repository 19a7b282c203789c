import { locks, namesIn, read, remove, store } from "../../storage/files.js";
import { sha256Hex } from "../../storage/http.js";

/**
 * The results of trials of programs, kept for later loads; each pair of an artifact and an adapter has a
 * file.
 *
 * A program is noted before it is tried. If a note exists while no tab is trying, the program took the tab or
 * the browser down, and is never tried again. One tab tries at a time and holds a lock as long as it lives,
 * so a live tab's note is not taken for a crash.
 */

const FOLDER = "nearfar-variants";

/** The file of the notes. */
export interface NoteFile {
  /** The text of the notes; null if there is none. */
  read(): Promise<string | null>;
  write(text: string): Promise<void>;
}

interface Notes {
  /** Programs that lost the device. */
  readonly lost: readonly string[];
  /** The program that a trial has chosen, by its finalists. */
  readonly chosen: Readonly<Record<string, string>>;
  /** The program that is being tried, and the load that tries it. */
  readonly trying: { readonly program: string; readonly load: string } | null;
}

const NONE: Notes = { lost: [], chosen: {}, trying: null };

export interface KeptOptions {
  /** Whether another tab is trying programs now. */
  readonly busy: boolean;
  /** The name of this load, by which a page can note later that it was left on purpose. */
  readonly load: string;
  /**
   * Whether the page of that load was closed or left without a fault. It is asked once the load's lock is
   * free, because a live page may still be left, or come back.
   */
  readonly hasLeft: (load: string) => Promise<boolean>;
}

export class Kept {
  #notes: Notes = NONE;

  private constructor(
    private readonly file: NoteFile,
    private readonly options: KeptOptions,
    private readonly release: () => void,
  ) {}

  /** Reads the notes. A damaged or foreign file is ignored. */
  static async open(file: NoteFile, options: KeptOptions, release = (): void => undefined): Promise<Kept> {
    const kept = new Kept(file, options, release);
    kept.#notes = parseNotes(await file.read().catch(() => null));
    const { trying } = kept.#notes;
    if (trying === null || options.busy) return kept;
    if (await options.hasLeft(trying.load)) await kept.#write({ trying: null });
    else await kept.lose(trying.program);
    return kept;
  }

  /** Programs that lost the device, here or earlier. */
  get lost(): readonly string[] {
    return this.#notes.lost;
  }

  get busy(): boolean {
    return this.options.busy;
  }

  /** The program that a trial of these programs has chosen; null if there was no trial. */
  chosen(names: readonly string[]): string | null {
    const found = this.#notes.chosen[names.join(" ")];
    return found !== undefined && names.includes(found) ? found : null;
  }

  /** Notes that a program is about to be tried. */
  async trying(program: string): Promise<void> {
    if (this.#notes.trying?.program === program) return;
    await this.#write({ trying: { program, load: this.options.load } });
  }

  /** Notes that a program lost the device. */
  async lose(program: string): Promise<void> {
    await this.#write({ lost: [...this.lost, program], trying: null });
  }

  /** Notes that a trial ended without a result and without a fault. */
  async stop(): Promise<void> {
    // The note of another load must stay.
    if (this.#notes.trying?.load === this.options.load) await this.#write({ trying: null });
  }

  /** Notes the result of a trial. */
  async keep(names: readonly string[], chosen: string): Promise<void> {
    await this.#write({ chosen: { ...this.#notes.chosen, [names.join(" ")]: chosen }, trying: null });
  }

  /** Releases the lock, so that other tabs can try. */
  close(): void {
    this.release();
  }

  /** Writes the notes. If the storage is full or forbidden, they last for this load only. */
  async #write(changed: Partial<Notes>): Promise<void> {
    this.#notes = { ...this.#notes, ...changed };
    await this.file.write(JSON.stringify(this.#notes)).catch(() => undefined);
  }
}

function parseNotes(text: string | null): Notes {
  try {
    const { lost, chosen, trying } = JSON.parse(text ?? "") as Notes;
    const names = [...lost, ...Object.values(chosen)];
    if (!Array.isArray(lost) || !names.every((name) => typeof name === "string")) return NONE;
    if (trying === null) return { lost, chosen, trying };
    const { program, load } = trying;
    return typeof program === "string" ? { lost, chosen, trying: { program, load } } : NONE;
  } catch {
    return NONE;
  }
}

/**
 * Opens the notes on an artifact (by the digest of its manifest, which covers all kernels) and an adapter. If
 * the browser stores nothing (private windows), they last for this load only.
 */
export async function openKept(
  digest: string,
  adapter: object,
  options: Omit<KeptOptions, "busy">,
): Promise<Kept> {
  const name = await sha256Hex(new TextEncoder().encode(JSON.stringify([digest, adapter])));
  const directory = await openFolder();
  // Without locks, a live tab's note could not be told from a dead tab's.
  if (!directory || !locks) return Kept.open(NOWHERE, { ...options, busy: false });
  const release = await lockAlone(`${FOLDER} ${name}`, locks).catch(() => undefined);
  if (release === undefined) return Kept.open(NOWHERE, { ...options, busy: false });
  if (release !== null)
    // The file was left half written by a tab that was closed.
    for (const other of await namesIn(directory).catch(() => []))
      if (other.startsWith(`${name}.`)) await remove(directory, other).catch(() => undefined);
  const busy = release === null;
  return Kept.open(noteFile(directory, name), { ...options, busy }, release ?? undefined).catch((error) => {
    release?.();
    throw error;
  });
}

const NOWHERE: NoteFile = { read: async () => null, write: async () => undefined };

function noteFile(directory: FileSystemDirectoryHandle, name: string): NoteFile {
  return {
    read: async () => {
      const bytes = await read(directory, name);
      return bytes && new TextDecoder().decode(bytes);
    },
    write: (text) => store(directory, name, new TextEncoder().encode(text), true),
  };
}

async function openFolder(): Promise<FileSystemDirectoryHandle | null> {
  try {
    const root = await navigator.storage.getDirectory();
    return await root.getDirectoryHandle(FOLDER, { create: true });
  } catch {
    return null;
  }
}

/** Holds the lock until it is released or the tab ends; null where another tab holds it. */
function lockAlone(name: string, locks: LockManager): Promise<(() => void) | null> {
  return new Promise((resolve, reject) => {
    const hold = (lock: Lock | null): Promise<void> | undefined => {
      if (!lock) {
        resolve(null);
        return;
      }
      return new Promise((release) => resolve(release));
    };
    locks.request(name, { ifAvailable: true }, hold).catch(reject);
  });
}
