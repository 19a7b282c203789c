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
  /** The manifest of an artifact that was kept for use without a network; null if none was kept. */
  readonly kept?: (base: URL) => Promise<string | null>;
  /**
   * Hashes of the manifests that are accepted, in the form of HTML's integrity attribute; by default any
   * manifest is.
   */
  readonly integrity?: string | undefined;
}

/** The server lists the artifacts of the folder, and a wanted one is not among them. */
class ListedError extends MissingError {
  constructor(
    url: URL,
    readonly targets: readonly string[],
  ) {
    super(`${url.href} lists ${targets.join(", ")}: no artifact for a browser. Build it for webgpu or wasm.`);
  }
}

/** The artifacts that can be loaded, by backend. */
export type Artifacts = ReadonlyMap<BackendName, Found>;

const MANIFEST = "manifest.json";

/**
 * Finds the artifact at `base`; or, if `base` is the OUT folder of a build, the artifacts for browsers in it.
 * `pinned` restricts the search to one backend's artifact.
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
    // The server was reached before, so one request went wrong, and the network is not missing.
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

/**
 * Whether an artifact was not found. An unreachable server counts too, because another artifact of the folder
 * may be kept for use without a network.
 */
function isAbsent(error: unknown): error is Error {
  return error instanceof MissingError || error instanceof UnreachableError;
}

async function open(base: URL, options: FindOptions): Promise<Found> {
  const text = await manifestText(base, options);
  return { base, manifest: await openManifest(text), text };
}

/**
 * Loads the manifest from the server, so that a new build is noticed at once; without a network, takes the
 * kept one.
 */
async function manifestText(base: URL, { kept, integrity, ...options }: FindOptions): Promise<string> {
  const url = new URL(MANIFEST, base);
  const expected = integrity === undefined ? null : digestsIn(integrity);
  const isExpected = async (text: string): Promise<boolean> =>
    expected === null || expected.includes(await sha256Hex(new TextEncoder().encode(text)));
  // A kept manifest with an expected hash needs no request.
  const early = expected && ((await kept?.(base)) ?? null);
  if (early && (await isExpected(early))) return early;
  let text: string;
  try {
    // The HTTP cache is not used, because an old manifest would not match new shards.
    text = await fetchText(url, null, { ...options, cache: "no-cache" });
  } catch (error) {
    const copy = error instanceof UnreachableError && !expected ? await kept?.(base) : null;
    if (!copy) throw error;
    return copy;
  }
  // Servers of single-page apps answer every address with the app's page.
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

/** The targets of a folder, if a server lists them in place of a manifest; null for a manifest. */
function targetsIn(text: string): readonly string[] | null {
  // Manifests are long, so only a text with the listing's key is parsed here.
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
