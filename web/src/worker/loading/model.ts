/** Opens a model from its artifact: on a device, with tokenizer and chat template. */

import { type Found, findArtifacts } from "../../artifact/artifacts.js";
import { filesOf, type Manifest, type Program, type SealedManifest } from "../../artifact/manifest.js";
import type { BackendName } from "../../protocol/backends.js";
import { DeviceError } from "../../protocol/errors.js";
import type { BackendChoice, LoadSettings, LoadStep, ProgramChoice } from "../../protocol/messages.js";
import { keptManifest, openOpfsCache } from "../../storage/file-cache.js";
import type { Loaded } from "../device/loaded.js";
import type { LoadOptions } from "../gpu/load.js";
import type { Host } from "../host.js";
import type { ShardProgress } from "../store/shards.js";
import type { TextCodec } from "../text/types.js";
import { type Chosen, choose } from "./choice.js";
import { loadCodec } from "./codec.js";
import type { Parts } from "./parts.js";

export interface ModelHooks {
  readonly host: Host;
  readonly parts: Parts;
  readonly signal: AbortSignal;
  /** The name of this load. */
  readonly load: string;
  /** Whether the user left the page of another load. */
  readonly hasLeft: (load: string) => Promise<boolean>;
  readonly onProgress: (step: LoadStep) => void;
  readonly onWarning: (message: string) => void;
}

export interface Model {
  readonly manifest: Manifest;
  readonly backend: BackendChoice;
  readonly loaded: Loaded;
  readonly codec: TextCodec;
  /** Loads the running program's executor again. */
  readonly again: (loaded: Loaded) => Promise<Loaded>;
  /** Waits until the files of the artifact are stored. */
  readonly settle: () => Promise<void>;
}

/** Opens the artifact in the folder `url`, on the best backend that is available. */
export async function openModel(url: URL, settings: LoadSettings, hooks: ModelHooks): Promise<Model> {
  const { signal, onProgress, host } = hooks;
  onProgress({ phase: "manifest" });
  const { fetch } = host;
  const artifacts = await findArtifacts(url, settings.backend, {
    ...{ fetch, signal, kept: keptManifest },
    integrity: settings.integrity,
  });
  let next: Chosen | null = await choose(artifacts, settings.backend);
  for (;;) {
    onProgress({ phase: "backend", backend: next.choice });
    try {
      return await openOn(next, settings, hooks);
    } catch (error) {
      next = error instanceof DeviceError ? next.other(error) : null;
      if (!next) throw error;
    }
  }
}

async function openOn({ choice, found }: Chosen, settings: LoadSettings, hooks: ModelHooks): Promise<Model> {
  const { base, manifest } = found;
  const { signal, load, hasLeft, onProgress, onWarning, host, parts } = hooks;
  const cache = await openCache(found, onWarning);
  cache?.hold(signal);
  const codec = loadCodec(found, { fetch: host.fetch, cache, signal }, parts);
  codec.catch(() => undefined);
  const open = await backendOf(choice.name, parts);
  const options = {
    ...settings,
    signal,
    cache,
    onWarning,
    load,
    hasLeft,
    host,
    fetch: host.fetch,
    onKernels: (compiled: number, total: number) => onProgress({ phase: "kernels", compiled, total }),
    onTrying: ({ name }: Program) => onProgress({ phase: "trying", program: name }),
    onProgram: ({ name }: Program, choice: ProgramChoice) =>
      onProgress({ phase: "program", program: name, choice }),
    onShards: (progress: ShardProgress) => onProgress({ phase: "weights", ...progress }),
  } satisfies LoadOptions & { readonly host: Host };
  const loaded = await open(base, manifest, options);
  // Loads the same program with a cache of the same size, so that requests can continue. A smaller cache is
  // accepted if the caller left its size open.
  const again = ({ program, executor }: Loaded): Promise<Loaded> =>
    open(base, manifest, {
      ...options,
      onProgram: undefined,
      program: program.name,
      kvMemory: executor.kvMemory,
      orLess: settings.kvMemory === undefined,
    });
  // If the storage is full, the weights' load has already warned.
  const settle = async (): Promise<void> => cache?.settle().catch(() => undefined);
  try {
    return { manifest, backend: choice, loaded, codec: await codec, again, settle };
  } catch (error) {
    loaded.executor.dispose();
    throw error;
  }
}

function openCache(
  { base, manifest, text }: Found,
  onWarning: (message: string) => void,
): ReturnType<typeof openOpfsCache> {
  const { name } = manifest.model;
  const large = [...manifest.weights.shards, ...manifest.packs];
  const files = { url: base, name, manifest: text, files: filesOf(manifest), large };
  return openOpfsCache(files, (lacking) =>
    onWarning(
      `The browser's storage has ${lacking} bytes too few for the model: the model runs, ` +
        "but the next visit downloads it again.",
    ),
  );
}

type OpenBackend = (
  base: URL,
  manifest: SealedManifest,
  options: LoadOptions & { readonly host: Host; readonly threads?: number | undefined },
) => Promise<Loaded>;

async function backendOf(name: BackendName, { gpu, wasm }: Parts): Promise<OpenBackend> {
  return name === "wasm" ? (await wasm()).loadWasm : (await gpu()).loadExecutor;
}
