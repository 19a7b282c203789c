import { LISTING } from "../format/constants.js";
import { BACKENDS, type BackendName } from "../protocol/backends.js";
import { ArtifactError, RequestError, UnreachableError } from "../protocol/errors.js";
import { type DownloadOptions, fetchText, MissingError, sha256Hex } from "../storage/http.js";
import { parseJson } from "./json.js";
import type { SealedManifest } from "./manifest.js";
import { openManifest } from "./reader.js";

/** An artifact on its server. */
export interface Found {
  readonly base: URL;
  readonly manifest: SealedManifest;
  /** The text of manifest.json. */
  readonly text: string;
}

export interface FindOptions extends DownloadOptions {
  /** The manifest of an artifact that was kept for when there is no network; null where none was. */
  readonly kept?: (base: URL) => Promise<string | null>;
  /** Hashes of manifests that will do, as in HTML; any where it is left out. */
  readonly integrity?: string | undefined;
}

/** A folder of several, whose server tells which: nobody asks for those that it lacks. */
class ListedError extends MissingError {
  constructor(
    url: URL,
    readonly targets: readonly string[],
  ) {
    super(`${url.href} lists ${targets.join(", ")}: no artifact for a browser. Build it for webgpu or wasm.`);
  }
}

/** What can be loaded: an artifact for each backend that there is one for. */
export type Artifacts = ReadonlyMap<BackendName, Found>;

const MANIFEST = "manifest.json";

/**
 * The artifact at `base`; or, where `base` is the OUT folder of a build, those for browsers in it. `pinned`:
 * nobody asks for the others.
 */
export async function findArtifacts(
  base: URL,
  pinned: BackendName | undefined,
  options: FindOptions,
): Promise<Artifacts> {
  const one = await open(base, options).catch((error: unknown) => error);
  if (!(one instanceof Error)) return new Map([[(one as Found).manifest.target, one as Found]]);
  if (!isAbsent(one)) throw one;
  const found = new Map<BackendName, Found>();
  const wanted = BACKENDS.filter(
    (name) =>
      (pinned === undefined || name === pinned) &&
      !(one instanceof ListedError && !one.targets.includes(name)),
  );
  const looks = wanted.map(async (name) => {
    const look = (): Promise<unknown> =>
      open(new URL(`${name}/`, base), options).catch((error: unknown) => error);
    let there = await look();
    // The server was reached before: this is no lack of it, but a request that went wrong.
    if (there instanceof UnreachableError && one instanceof MissingError) {
      there = await look();
      if (there instanceof UnreachableError) throw there;
    }
    if (isAbsent(there)) return;
    if (there instanceof Error) throw there;
    found.set(name, there as Found);
  });
  await Promise.all(looks);
  if (found.size === 0) throw one;
  return found;
}

/** Without a network no server can say what it lacks; what was kept for that case answers all the same. */
function isAbsent(error: unknown): error is Error {
  return error instanceof MissingError || error instanceof UnreachableError;
}

async function open(base: URL, options: FindOptions): Promise<Found> {
  const text = await manifestText(base, options);
  return { base, manifest: await openManifest(text), text };
}

/** From the server, so that a new build is noticed at once; what was kept where there is no network. */
async function manifestText(base: URL, { kept, integrity, ...options }: FindOptions): Promise<string> {
  const url = new URL(MANIFEST, base);
  const expected = integrity === undefined ? null : digestsIn(integrity);
  const isExpected = async (text: string): Promise<boolean> =>
    expected === null || expected.includes(await sha256Hex(new TextEncoder().encode(text)));
  // What is expected need not be asked for.
  const early = expected && ((await kept?.(base)) ?? null);
  if (early && (await isExpected(early))) return early;
  let text: string;
  try {
    // Not from the HTTP cache: an old manifest would not match new shards.
    text = await fetchText(url, null, { ...options, cache: "no-cache" });
  } catch (error) {
    const copy = error instanceof UnreachableError && !expected ? await kept?.(base) : null;
    if (!copy) throw error;
    return copy;
  }
  // Servers of apps with one page answer every address with that page.
  if (text.trimStart().startsWith("<"))
    throw new MissingError(
      `${url.href} answers HTTP 200 with HTML, not a manifest: the server sends its page for files that it ` +
        "lacks. Is the artifact's address right?",
      { code: "not-an-artifact" },
    );
  const listed = targetsIn(text);
  if (listed) throw new ListedError(url, listed);
  if (await isExpected(text)) return text;
  throw new ArtifactError(
    `${url.href} is not the manifest that is expected: its hash is not in integrity (${integrity}). Upload ` +
      "the artifact again, or give the hash of the one that is there.",
  );
}

/** The targets, where a server lists those of a folder in the place of a manifest; else null. */
function targetsIn(text: string): readonly string[] | null {
  // Manifests are long: only one that has the word is read twice.
  if (!text.includes(`"${LISTING}"`)) return null;
  const root = parseJson<{ format: string; targets: string[] }>(text, MANIFEST);
  return root.at("format").value === LISTING ? root.at("targets").list((name) => name.string()) : null;
}

/** The SHA-256 digests of an integrity attribute, in hexadecimal. */
function digestsIn(integrity: string): string[] {
  return integrity
    .trim()
    .split(/\s+/)
    .map((hash) => {
      if (!/^sha256-[A-Za-z0-9+/]{43}=$/.test(hash))
        throw new RequestError(
          `integrity has ${JSON.stringify(hash)}; give "sha256-" and 44 characters of base64.`,
          "integrity",
        );
      const bytes = Array.from(atob(hash.slice("sha256-".length)), (char) => char.charCodeAt(0));
      return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
    });
}
