import type { Artifacts, Found } from "../../artifact/artifacts.js";
import { BACKENDS, type BackendName } from "../../protocol/backends.js";
import { ArtifactError, type DeviceError, RequestError } from "../../protocol/errors.js";
import type { BackendChoice } from "../../protocol/messages.js";
import { findGpu } from "../gpu/adapter.js";

/** The chosen artifact, and the alternative if it fails. */
export interface Chosen {
  readonly choice: BackendChoice;
  readonly found: Found;
  readonly other: (error: DeviceError) => Chosen | null;
}

/**
 * Chooses WebGPU where the browser has an adapter, else WebAssembly. A software GPU comes second: WebAssembly
 * was measured to be the faster of the two there (docs/benchmarks.md).
 */
export async function choose(artifacts: Artifacts, pinned: BackendName | undefined): Promise<Chosen> {
  const names = [...artifacts.keys()];
  if (pinned !== undefined && !BACKENDS.includes(pinned))
    throw new RequestError(`backend is ${pinned}; there are ${BACKENDS.join(" and ")}.`, "backend");
  if (pinned !== undefined) {
    if (artifacts.has(pinned)) return chosen(artifacts, pinned, "pinned", "it was requested");
    throw new ArtifactError(
      `The artifact is built for ${names.join(", ")}, not ${pinned}. Build one with: nearfar build … ` +
        `--target ${pinned}`,
      { code: "artifact-unsuitable" },
    );
  }
  const [only = "webgpu"] = names;
  if (names.length === 1) return chosen(artifacts, only, "only", `the artifact is for ${only} alone`);
  const gpu = await findGpu().catch((error: unknown) => error);
  if (gpu instanceof Error) return chosen(artifacts, "wasm", "no-gpu", gpu.message);
  const { deviceClass, name } = gpu as Awaited<ReturnType<typeof findGpu>>;
  if (deviceClass === "software")
    return {
      ...chosen(artifacts, "wasm", "software", `the GPU is a software GPU (${name})`),
      other: (error) => chosen(artifacts, "webgpu", "failed", error.message),
    };
  return {
    ...chosen(artifacts, "webgpu", "gpu", name),
    other: (error) => chosen(artifacts, "wasm", "failed", error.message),
  };
}

function chosen(artifacts: Artifacts, name: BackendName, why: BackendChoice["why"], reason: string): Chosen {
  const found = artifacts.get(name);
  if (!found) throw new Error(`there is no artifact for ${name}`);
  return { choice: { name, why, reason }, found, other: () => null };
}
