import type { Manifest, Program } from "../../artifact/manifest.js";
import { DeviceError, RequestError, throwIfAborted } from "../../protocol/errors.js";
import type { ProgramChoice } from "../../protocol/messages.js";
import type { FileCache } from "../../storage/file-cache.js";
import type { Fetch } from "../../storage/http.js";
import { initialize, shapeOf } from "../device/beginning.js";
import type { Loaded } from "../device/loaded.js";
import { cacheBuffers, type MemoryOptions } from "../device/memory.js";
import type { PlanArg } from "../device/plan.js";
import { RemoteArtifact } from "../device/remote-artifact.js";
import type { Host } from "../host.js";
import { type ShardProgress, streamShards } from "../store/shards.js";
import { type PageRegion, WasmExecutor } from "./executor.js";
import { ATOMICS, ableProgram, ISOLATE, wasmFeatures } from "./features.js";
import { instantiate, kernelsOf, loadModule } from "./instance.js";
import type { MemoryLayout, Region } from "./layout.js";
import { makeRoom, type Room } from "./room.js";
import { Threads, worthStarting } from "./threads.js";

export interface WasmOptions extends MemoryOptions {
  readonly host: Host;
  /** Take only the program of this name. */
  readonly program?: string | undefined;
  /** Take only programs whose KV cache has this many bits a value. */
  readonly kvBits?: number | undefined;
  /** The number of computing threads; by default as many as there seem to be cores. */
  readonly threads?: number | undefined;
  readonly fetch?: Fetch | undefined;
  readonly signal?: AbortSignal | undefined;
  readonly cache: FileCache | null;
  readonly onProgram?: ((program: Program, choice: ProgramChoice) => void) | undefined;
  readonly onShards?: ((progress: ShardProgress) => void) | undefined;
  readonly onWarning?: ((message: string) => void) | undefined;
}

/** Instantiates the artifact at `base` with everything that it needs, and starts its threads. */
export async function loadWasm(base: URL, manifest: Manifest, options: WasmOptions): Promise<Loaded> {
  const { host, signal = new AbortController().signal, onProgram } = options;
  const wanted = threadsWanted(options.threads, host);
  const program = ableProgram(manifest, wasmFeatures(host.spawn !== null), wanted, options);
  const choice: ProgramChoice = {
    deviceClass: null,
    why: options.program === undefined ? "only" : "pinned",
    measured: {},
  };
  onProgram?.(program, choice);
  const files = await new RemoteArtifact(base, manifest, options).open(program, signal);
  const [module, plans] = await Promise.all([loadModule(program, files.read), files.plans()]);
  const shared = program.requires.features.includes(ATOMICS);
  const count = shared ? wanted : 1;
  if (count < (options.threads ?? 1))
    options.onWarning?.(`One thread computes, not ${options.threads}: ${whyOne(host, program)}`);
  // Memory comes first: a device that is too small should say so before the download, not after it.
  const room = await makeRoom(manifest, program, plans, { ...options, threads: count, shared });
  const threads = new Threads();
  try {
    const { memory, layout, tables } = room;
    const exports = await instantiate(module, memory);
    const pool = exports.nf_pool_new(count, host.hardwareThreads) >>> 0;
    if (pool === 0)
      throw new DeviceError(`The module has no room for a pool of ${count} threads. Give fewer.`, {
        code: "out-of-memory",
      });
    const region = regionsOf(manifest, layout);
    const functions = kernelsOf(exports, memory, program);
    const kernel = (name: string): number => functions.get(name) ?? 0;
    const bound = tables.write(memory.buffer, layout.tables, { region, kernel });
    const tasks = layout.stacks.map((stack) => ({ module, memory, pool, stack }));
    const lacking: string[] = [];
    await Promise.all([
      host.spawn ? threads.start(host.spawn, tasks, (why) => lacking.push(why)) : undefined,
      streamInto(base, manifest, room, { ...options, signal, onProgress: options.onShards }),
    ]);
    throwIfAborted(signal);
    if (lacking.length > 0)
      options.onWarning?.(`${lacking.length} of ${count} threads could not be started: ${lacking[0]}`);
    const cache = pagesOf(manifest, program, room);
    const shape = shapeOf(manifest, room.plan);
    const executor = new WasmExecutor({
      ...{ shape, memory, exports, pool, threads, cache, plans, bound, region },
      named: layout.named,
    });
    initialize(executor, manifest, (tensor) => frequenciesIn(room, manifest, tensor));
    return {
      executor,
      program,
      choice,
      adapterName: nameOf(threads.count),
      buffers: { count: 0, bytes: 0 },
    };
  } catch (error) {
    threads.end();
    throw error;
  }
}

function threadsWanted(asked: number | undefined, { spawn, hardwareThreads }: Host): number {
  if (asked !== undefined && (!Number.isInteger(asked) || asked < 1 || asked > 64))
    throw new RequestError(`threads is ${asked}; give an integer from 1 to 64.`, "threads");
  return spawn ? (asked ?? worthStarting(hardwareThreads)) : 1;
}

/** Why the program runs with a single thread. */
function whyOne({ spawn }: Host, program: Program): string {
  if (typeof SharedArrayBuffer !== "function") return `memory cannot be shared here. ${ISOLATE}`;
  if (!spawn) return "there are no workers here, as in a service worker.";
  return `the program ${program.name} is for one thread.`;
}

function nameOf(threads: number): string {
  return `WebAssembly, ${threads} ${threads === 1 ? "thread" : "threads"}`;
}

/** Streams the weights from the store to their place; at most two shards are in memory at the same time. */
async function streamInto(
  base: URL,
  { weights: { shards, shardBytes } }: Manifest,
  { memory, layout }: Room,
  options: Parameters<typeof streamShards>[2],
): Promise<void> {
  const bytes = new Uint8Array(memory.buffer);
  let at = layout.weights;
  for await (const shard of streamShards(base, shards, options)) {
    bytes.set(shard, at);
    at += shardBytes;
  }
}

function regionsOf({ weights }: Manifest, layout: MemoryLayout): (arg: PlanArg) => Region {
  const tensors = new Map(
    weights.tensors.map(({ name, offset, bytes }) => [name, { at: layout.weights + offset, bytes }]),
  );
  return ({ space, name }) => {
    const found =
      space === "weight"
        ? tensors.get(name)
        : space === "workspace"
          ? layout.workspace[Number(name)]
          : layout.named.get(name);
    if (!found) throw new Error(`a plan names ${space}:${name}, which manifest.json does not list`);
    return found;
  };
}

function pagesOf(manifest: Manifest, program: Program, { plan, layout }: Room): PageRegion[] {
  return cacheBuffers(manifest, program).flatMap(({ name, group, pageBytes }): PageRegion[] => {
    const region = layout.named.get(name);
    return region ? [{ group, pageBytes, at: region.at, pages: plan.pages[group] ?? 0 }] : [];
  });
}

/** Reads a float32 tensor from the weights in memory. */
function frequenciesIn({ memory, layout }: Room, { weights }: Manifest, name: string): Float32Array {
  const { offset = 0, bytes = 0 } = weights.tensors.find((tensor) => tensor.name === name) ?? {};
  return new Float32Array(memory.buffer, layout.weights + offset, bytes / 4);
}
