import type { FunctionName, Program } from "../../artifact/manifest.js";
import type { ProgramChoice } from "../../protocol/messages.js";
import type { TimedBackend } from "../engine/profile.js";

/** A device that runs a model, with what is told of it. */
export interface ModelBackend extends TimedBackend {
  /** Kernels launched since the device was opened. */
  readonly launches: number;
  /** Kernels that the smallest size of a function launches. */
  launchesOf(name: FunctionName): number;
  /** Bytes of the cache. */
  readonly kvMemory: number;
  /** What WebAssembly holds: bytes of its memory, and threads that compute. */
  readonly held?: { readonly bytes: number; readonly threads: number };
}

/** A model on a device, whatever kind of device it is. */
export interface Loaded {
  readonly executor: ModelBackend;
  readonly program: Program;
  readonly choice: ProgramChoice;
  /** What the device calls itself, for people. */
  readonly adapterName: string;
  /** GPU buffers. */
  readonly buffers: { readonly count: number; readonly bytes: number };
}
