import { ArtifactError, DeviceError } from "../both/errors.js";
import { type DownloadOptions, fetchText, MissingError } from "../both/http.js";
import { type BackendName, BACKENDS, openManifest, type SealedManifest } from "../both/manifest.js";
import type { BackendChoice } from "../both/messages.js";
import { findGpu } from "./gpu/device.js";

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
  if (!(one instanceof MissingError)) throw one;
  const found = new Map<BackendName, Found>();
  const wanted = BACKENDS.filter((name) => pinned === undefined || name === pinned);
  const looks = wanted.map(async (name) => {
    const there = await open(new URL(`${name}/`, base), options).catch((error: unknown) => error);
    if (there instanceof MissingError) return;
    if (there instanceof Error) throw there;
    found.set(name, there as Found);
  });
  await Promise.all(looks);
  if (found.size === 0) throw one;
  return found;
}

/** What is used of the artifacts, and what else would do where that fails. */
export interface Chosen {
  readonly choice: BackendChoice;
  readonly found: Found;
  readonly other: (error: DeviceError) => Chosen | null;
}

/**
 * WebGPU where the browser has an adapter, else WebAssembly. A processor that plays a GPU is left alone:
 * WebAssembly was measured to be the faster of the two there (docs/benchmarks.md).
 */
export async function choose(artifacts: Artifacts, pinned: BackendName | undefined): Promise<Chosen> {
  const names = [...artifacts.keys()];
  if (pinned !== undefined) {
    if (artifacts.has(pinned)) return chosen(artifacts, pinned, "pinned", "it was asked for");
    throw new ArtifactError(
      `The artifact is built for ${names.join(", ")}, not ${pinned}. Build one with: nearfar build … ` +
        `--target ${pinned}`,
    );
  }
  const [only = "webgpu"] = names;
  if (names.length === 1) return chosen(artifacts, only, "only", `the artifact is for ${only} alone`);
  const gpu = await findGpu().catch((error: unknown) => error);
  if (gpu instanceof Error) return chosen(artifacts, "wasm", "no-gpu", gpu.message);
  const { deviceClass, name } = gpu as Awaited<ReturnType<typeof findGpu>>;
  if (deviceClass === "software")
    return chosen(artifacts, "wasm", "software", `a processor plays the GPU (${name})`);
  return {
    ...chosen(artifacts, "webgpu", "gpu", name),
    other: (error) => chosen(artifacts, "wasm", "failed", error.message),
  };
}

function chosen(
  artifacts: Artifacts,
  name: BackendName,
  why: BackendChoice["why"],
  reason: string,
): Chosen {
  const found = artifacts.get(name);
  if (!found) throw new Error(`there is no artifact for ${name}`);
  return { choice: { name, why, reason }, found, other: () => null };
}

async function open(base: URL, options: DownloadOptions): Promise<Found> {
  // Not from the HTTP cache: an old manifest would not match new shards.
  const text = await fetchText(new URL(MANIFEST, base), null, { ...options, cache: "no-cache" });
  return { base, manifest: await openManifest(text) };
}
