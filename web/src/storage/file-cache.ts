import { BEGUN, BegunFile } from "./begun.js";
import { alone, isNamed, locks, namesIn, read, remove, store } from "./files.js";
import { sha256Hex } from "./http.js";

/**
 * Stores verified files between visits. The key of a file is its SHA-256, so artifacts share copies of equal
 * files, and files of two builds are never confused.
 */
export interface FileCache {
  /** Null where the file is not cached. */
  get(sha256: string): Promise<Uint8Array<ArrayBuffer> | null>;
  /** Stores a file. `begun`, if given, contains these bytes already; it is kept, or deleted. */
  put(sha256: string, bytes: Uint8Array<ArrayBuffer>, begun?: BegunFile | null): Promise<void>;
  delete(sha256: string): Promise<void>;
  /** Opens a partly downloaded file; null where none can be stored. Only one caller at a time has it. */
  begun?(sha256: string): Promise<BegunFile | null>;
}

const FILES = "nearfar-files";
const LISTS = "nearfar-lists";
/** Lock that all writers share and a sweep holds alone, over all tabs of the origin. */
const LOCK = "nearfar-files";

/** The stored files of an artifact. */
interface FileList {
  readonly url: string;
  /** The model's name. */
  readonly name: string;
  /** When it was last loaded; milliseconds since 1970. */
  readonly used: number;
  /** The SHA-256 of the manifest that was last loaded completely; null before that. */
  readonly manifest: string | null;
  /** Files of the build that this manifest describes. */
  readonly files: readonly string[];
  /** Files of the build that is being loaded; the last build stays until this one is complete. */
  readonly coming: readonly string[];
}

/** The artifact that is being loaded. */
export interface Artifact {
  readonly url: URL;
  readonly name: string;
  /** The text of its manifest. */
  readonly manifest: string;
  /** SHA-256 digests of the files. */
  readonly files: readonly string[];
  /** The largest files. */
  readonly large?: readonly { readonly sha256: string; readonly bytes: number }[];
}

/** A model in the browser's storage. */
export interface CachedModel {
  readonly url: string;
  readonly name: string;
  /** Bytes of its files; files shared with other models count for each. */
  readonly bytes: number;
  readonly lastUsed: Date;
  /** Whether it was once loaded completely, so that it starts without a network. */
  readonly complete: boolean;
}

interface Folders {
  readonly files: FileSystemDirectoryHandle;
  readonly lists: FileSystemDirectoryHandle;
}

/** The origin private file system; null where it is missing (private windows, old browsers). */
async function openFolders(): Promise<Folders | null> {
  try {
    const root = await navigator.storage.getDirectory();
    const open = (name: string): Promise<FileSystemDirectoryHandle> =>
      root.getDirectoryHandle(name, { create: true });
    return { files: await open(FILES), lists: await open(LISTS) };
  } catch {
    return null;
  }
}

function listName(url: URL | string): Promise<string> {
  return sha256Hex(new TextEncoder().encode(String(url)));
}

/**
 * Opens the origin private file system for an artifact that is being loaded; null where it is missing or has
 * too little room, which `onShort` is called with. Files that belong to no artifact of this origin any more
 * are deleted.
 */
export async function openOpfsCache(
  artifact: Artifact,
  onShort: (lacking: number) => void = () => undefined,
): Promise<OpfsCache | null> {
  const folders = await openFolders();
  if (!folders) return null;
  try {
    const manifest = await sha256Hex(new TextEncoder().encode(artifact.manifest));
    const cache = new OpfsCache(folders, artifact, await listName(artifact.url), manifest);
    const lacking = await cache.lacking().catch(() => 0);
    if (lacking > 0) {
      onShort(lacking);
      return null;
    }
    await cache.claim().catch(() => undefined);
    return cache;
  } catch {
    return null;
  }
}

/** The manifest of the artifact at `url` that was last loaded completely; null where there is none. */
export async function keptManifest(url: URL): Promise<string | null> {
  try {
    const folders = await openFolders();
    if (!folders) return null;
    const list = parseList(await read(folders.lists, await listName(url)));
    if (!list?.manifest) return null;
    const bytes = await read(folders.files, list.manifest);
    const isWhole = bytes !== null && (await sha256Hex(bytes)) === list.manifest;
    return isWhole ? new TextDecoder().decode(bytes) : null;
  } catch {
    return null;
  }
}

/** The models in this origin's storage, the last used first. */
export async function cachedModels(): Promise<CachedModel[]> {
  const folders = await openFolders();
  if (!folders) return [];
  const models: CachedModel[] = [];
  for (const { url, name, used, manifest, files, coming } of (await readLists(folders)).values()) {
    let bytes = 0;
    for (const file of new Set([...files, ...coming])) bytes += await sizeOf(folders.files, file);
    models.push({ url, name, bytes, lastUsed: new Date(used), complete: manifest !== null });
  }
  return models.sort((a, b) => b.lastUsed.getTime() - a.lastUsed.getTime());
}

/**
 * Deletes the stored files of the artifact in the folder `base`, or of those in folders of it, except files
 * that other artifacts share. A loaded model keeps running. Returns whether there was one.
 */
export async function deleteModel(base: URL): Promise<boolean> {
  const folders = await openFolders();
  if (!folders) return false;
  let found = false;
  for (const [name, list] of await readLists(folders)) {
    if (![base.href, `${base.href}webgpu/`, `${base.href}wasm/`].includes(list.url)) continue;
    found = true;
    await locked("shared", () => remove(folders.lists, name));
  }
  await locked("exclusive", () => sweep(folders));
  return found;
}

/**
 * Name of the lock that is held, shared, while the model of that list runs: a lost GPU is reopened from its
 * files.
 */
function runs(list: string): string {
  return `nearfar-runs ${list}`;
}

export class OpfsCache implements FileCache {
  readonly #files: readonly string[];

  constructor(
    private readonly folders: Folders,
    private readonly artifact: Artifact,
    /** The key of the artifact's list. */
    private readonly list: string,
    /** SHA-256 of the manifest. */
    private readonly manifest: string,
  ) {
    this.#files = [...new Set([...artifact.files, manifest])];
  }

  /**
   * Bytes that the storage lacks for the artifact if all others were deleted; 0 if it suffices, or if the
   * browser does not say: Chrome reports 10 GiB, and later rejects files that do not fit.
   */
  async lacking(): Promise<number> {
    const { quota, usage = 0 } = await navigator.storage.estimate();
    if (quota === undefined) return 0;
    let wanted = 0;
    for (const { sha256, bytes } of this.artifact.large ?? [])
      if ((await sizeOf(this.folders.files, sha256)) !== bytes) wanted += bytes;
    if (wanted <= quota - usage) return 0;
    let others = 0;
    for (const name of await namesIn(this.folders.files))
      if (!this.#files.includes(name)) others += await sizeOf(this.folders.files, name);
    return Math.max(wanted - (quota - usage) - others, 0);
  }

  /** Stores which files the artifact needs, and deletes files that no artifact needs. */
  async claim(): Promise<void> {
    const last = parseList(await read(this.folders.lists, this.list));
    await this.#write({ manifest: last?.manifest ?? null, files: last?.files ?? [], coming: this.#files });
    await locked("idle", () => sweep(this.folders));
  }

  /** Protects the files from models that need their room, until `signal` aborts. */
  hold(signal: AbortSignal): void {
    const held = new Promise<void>((resolve) => signal.addEventListener("abort", () => resolve()));
    locks?.request(runs(this.list), { mode: "shared" }, () => held).catch(() => undefined);
  }

  /**
   * Notes that the load is complete: now the artifact starts without a network, and its last build is
   * deleted.
   */
  async settle(): Promise<void> {
    await this.put(this.manifest, new TextEncoder().encode(this.artifact.manifest));
    await this.#write({ manifest: this.manifest, files: this.#files, coming: [] });
    await locked("idle", () => sweep(this.folders));
  }

  get(sha256: string): Promise<Uint8Array<ArrayBuffer> | null> {
    return read(this.folders.files, sha256);
  }

  async put(sha256: string, bytes: Uint8Array<ArrayBuffer>, begun: BegunFile | null = null): Promise<void> {
    const write = (): Promise<void> =>
      locked("shared", async () => {
        if (!(await begun?.keep(sha256, bytes.length))) await store(this.folders.files, sha256, bytes);
      });
    try {
      await write();
    } catch (error) {
      // Other artifacts are deleted to make room for this one, the least recently used first.
      if (!isNamed(error, "QuotaExceededError") || !(await this.#makeRoom())) throw error;
      await write();
    }
  }

  delete(sha256: string): Promise<void> {
    return locked("shared", () => alone(sha256, () => remove(this.folders.files, sha256)));
  }

  begun(sha256: string): Promise<BegunFile | null> {
    return BegunFile.open(this.folders.files, sha256);
  }

  async #write(what: Pick<FileList, "manifest" | "files" | "coming">): Promise<void> {
    const list: FileList = {
      url: this.artifact.url.href,
      name: this.artifact.name,
      used: Date.now(),
      ...what,
    };
    const bytes = new TextEncoder().encode(JSON.stringify(list));
    await locked("shared", () => store(this.folders.lists, this.list, bytes));
  }

  /** Deletes a list, unless a tab runs its model. Returns whether it did. */
  async #giveUp(list: string): Promise<boolean> {
    const giveUp = async (isIdle: boolean): Promise<boolean> => {
      if (isIdle) await locked("shared", () => remove(this.folders.lists, list));
      return isIdle;
    };
    if (!locks) return giveUp(true);
    return locks.request(runs(list), { ifAvailable: true }, (lock) => giveUp(lock !== null));
  }

  /**
   * Deletes another artifact that no tab runs, or the last build of this one. Returns whether there was one.
   */
  async #makeRoom(): Promise<boolean> {
    const lists = await readLists(this.folders);
    const own = lists.get(this.list);
    lists.delete(this.list);
    const others = [...lists].sort(([, a], [, b]) => a.used - b.used);
    let gaveUp = false;
    for (let i = 0; i < others.length && !gaveUp; i++) gaveUp = await this.#giveUp(others[i]?.[0] ?? "");
    if (gaveUp) {
      // The sweep deletes the files of the last build.
    } else if (own?.files.some((name) => !this.#files.includes(name)))
      await this.#write({ manifest: null, files: [], coming: this.#files });
    else return false;
    await locked("idle", () => sweep(this.folders));
    return true;
  }
}

/** Deletes files that are in no list, and files that a closed tab left half written. */
async function sweep(folders: Folders): Promise<void> {
  const lists = await readLists(folders);
  const wanted = new Set([...lists.values()].flatMap(({ files, coming }) => [...files, ...coming]));
  for (const name of await namesIn(folders.files))
    if (!wanted.has(name.replace(BEGUN, ""))) await remove(folders.files, name);
  for (const name of await namesIn(folders.lists)) if (!lists.has(name)) await remove(folders.lists, name);
}

/** Reads all lists, by name; files that are not lists are left out. */
async function readLists(folders: Folders): Promise<Map<string, FileList>> {
  const lists = new Map<string, FileList>();
  for (const name of await namesIn(folders.lists)) {
    const list = parseList(await read(folders.lists, name));
    if (list) lists.set(name, list);
  }
  return lists;
}

function parseList(bytes: Uint8Array<ArrayBuffer> | null): FileList | null {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes ?? new Uint8Array()));
    const { url, name, used, manifest, files, coming } = value as FileList;
    const names = [url, name, ...files, ...coming, ...(manifest === null ? [] : [manifest])];
    const isList = Array.isArray(files) && Array.isArray(coming) && typeof used === "number";
    if (!isList || !names.every((each) => typeof each === "string")) return null;
    return { url, name, used, manifest, files, coming };
  } catch {
    return null;
  }
}

/** Size of a file; 0 where it does not exist. */
async function sizeOf(directory: FileSystemDirectoryHandle, name: string): Promise<number> {
  try {
    return (await (await directory.getFileHandle(name)).getFile()).size;
  } catch {
    return 0;
  }
}

/**
 * Runs `work` under the lock that all tabs of the origin share. "idle" runs it exclusively if nobody holds
 * the lock, else not at all.
 */
async function locked(mode: LockMode | "idle", work: () => Promise<void>): Promise<void> {
  if (!locks) return mode === "shared" ? await work() : undefined;
  const options = { mode: mode === "idle" ? "exclusive" : mode, ifAvailable: mode === "idle" } as const;
  await locks.request(LOCK, options, (lock) => (lock ? work() : undefined));
}
