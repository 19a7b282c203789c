import type { Program, SealedManifest } from "../../artifact/manifest.js";
import type { ProgramChoice, StepTimes } from "../../protocol/messages.js";
import type { FileCache } from "../../storage/file-cache.js";
import type { Fetch } from "../../storage/http.js";
import type { MemoryOptions } from "../device/memory.js";
import { RemoteArtifact } from "../device/remote-artifact.js";
import { openKept } from "../store/kept.js";
import type { ShardProgress } from "../store/shards.js";
import { findGpu, type Gpu } from "./adapter.js";
import type { BufferRegistry } from "./buffers.js";
import { ablePrograms, openDevice } from "./device.js";
import type { Executor } from "./executor.js";
import { type Opened, openBest, settled } from "./opening.js";
import { Stage } from "./stage.js";
import type { Finalists } from "./trial.js";
import type { TrialChoice } from "./variants.js";

export interface LoadOptions extends MemoryOptions {
  /** Take only the program of this name. */
  readonly program?: string | undefined;
  /** Take only programs whose KV cache has this many bits a value. */
  readonly kvBits?: number | undefined;
  readonly fetch?: Fetch | undefined;
  readonly signal?: AbortSignal | undefined;
  readonly cache: FileCache | null;
  /** The name of this load. */
  readonly load?: string | undefined;
  /** Whether the user left the page of another load while its programs were tried. */
  readonly hasLeft?: ((load: string) => Promise<boolean>) | undefined;
  readonly onTrying?: ((program: Program) => void) | undefined;
  readonly onProgram?: ((program: Program, choice: ProgramChoice) => void) | undefined;
  readonly onShards?: ((progress: ShardProgress) => void) | undefined;
  readonly onKernels?: ((compiled: number, total: number) => void) | undefined;
  readonly onWarning?: ((message: string) => void) | undefined;
}

export interface LoadedExecutor {
  readonly executor: Executor;
  readonly buffers: BufferRegistry;
  readonly program: Program;
  readonly choice: ProgramChoice;
  readonly adapterName: string;
}

/**
 * Opens a device for the artifact at `base` with the program that suits it, and uploads weights and kernels.
 * Frees everything if a part of this fails.
 */
export async function loadExecutor(
  base: URL,
  manifest: SealedManifest,
  options: LoadOptions,
): Promise<LoadedExecutor> {
  const gpu = await findGpu();
  const { stage, executor, program, choice } = await openStage(base, manifest, gpu, options);
  const told = choiceTold(choice, gpu);
  return { executor, buffers: stage.buffers, program, choice: told, adapterName: gpu.name };
}

/** Opens a device with the weights on it and the program that runs there. */
async function openStage(
  base: URL,
  manifest: SealedManifest,
  gpu: Gpu,
  options: LoadOptions,
): Promise<Opened<Stage, Executor>> {
  const signal = options.signal ?? new AbortController().signal;
  const artifact = new RemoteArtifact(base, manifest, options);
  const open = async (programs: Finalists, tried: readonly Program[]): Promise<Stage> => {
    // The adapter is requested again, because an adapter opens only one device, and a trial may lose that
    // device.
    const device = await openDevice(await findGpu(), programs);
    const software = gpu.deviceClass === "software";
    const staged = { ...options, onProgress: options.onShards, signal, software, tried };
    return Stage.open(artifact, device, programs, staged);
  };
  const hooks = {
    signal,
    onTrying: (program: Program) => options.onTrying?.(program),
    onChoice: (program: Program, choice: TrialChoice) =>
      options.onProgram?.(program, choiceTold(choice, gpu)),
    onPassedOver: ({ name }: Program, error: unknown) => {
      const reason = error instanceof Error ? error.message : String(error);
      options.onWarning?.(`The program ${name} is passed over: ${reason}`);
    },
  };
  const able = ablePrograms(manifest, gpu.abilities, options);
  const choice = settled(able, gpu.deviceClass, options.program !== undefined);
  if (choice) {
    const program = able.find(({ name }) => name === choice.program) ?? able[0];
    hooks.onChoice(program, choice);
    const stage = await open([program], []);
    try {
      return { stage, executor: await stage.settle(program), program, choice };
    } catch (error) {
      stage.close();
      throw error;
    }
  }
  const { load = crypto.randomUUID(), hasLeft = async () => false } = options;
  const kept = await openKept(manifest.digest, gpu.described, { load, hasLeft });
  try {
    // Opens a device that can run all programs, because the first one may fail and another run in the end.
    const openAll = (first: Program, tried: readonly Program[]): Promise<Stage> =>
      open([first, ...able.filter((program) => program !== first)], tried);
    return await openBest(able, gpu.deviceClass, kept, openAll, hooks);
  } finally {
    kept.close();
  }
}

function choiceTold({ why, seconds }: TrialChoice, { deviceClass }: Gpu): ProgramChoice {
  const measured = [...seconds].map(([name, { decode, large }]): [string, StepTimes] => [
    name,
    { decode: 1000 * (decode ?? 0), large: large === undefined ? null : 1000 * large },
  ]);
  return { deviceClass, why, measured: Object.fromEntries(measured) };
}
