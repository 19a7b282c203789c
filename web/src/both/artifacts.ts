import { UnreachableError } from "./errors.js";
import { type DownloadOptions, fetchText, MissingError } from "./http.js";
import { BACKENDS, type BackendName, openManifest, type SealedManifest } from "./manifest.js";

/** An artifact on its server. */
export interface Found {
  readonly base: URL;
  readonly manifest: SealedManifest;
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
  options: DownloadOptions,
): Promise<Artifacts> {
  const one = await open(base, options).catch((error: unknown) => error);
  if (!(one instanceof Error)) return new Map([[(one as Found).manifest.target, one as Found]]);
  if (!isAbsent(one)) throw one;
  const found = new Map<BackendName, Found>();
  const wanted = BACKENDS.filter((name) => pinned === undefined || name === pinned);
  const looks = wanted.map(async (name) => {
    const there = await open(new URL(`${name}/`, base), options).catch((error: unknown) => error);
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

async function open(base: URL, options: DownloadOptions): Promise<Found> {
  // Not from the HTTP cache: an old manifest would not match new shards.
  const text = await fetchText(new URL(MANIFEST, base), null, { ...options, cache: "no-cache" });
  // Servers of apps with one page answer every address with that page.
  if (text.trimStart().startsWith("<"))
    throw new MissingError(
      `${new URL(MANIFEST, base).href} answers HTTP 200 with HTML, not a manifest: the server sends its ` +
        "page for files that it lacks. Is the artifact's address right?",
      { code: "not-an-artifact" },
    );
  return { base, manifest: await openManifest(text) };
}
