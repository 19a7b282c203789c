import type { FunctionName, Program } from "../../artifact/manifest.js";
import type { ProgramChoice } from "../../protocol/messages.js";
import type { TimedBackend } from "../engine/profile.js";

/** A device that runs a model, with figures about it. */
export interface ModelBackend extends TimedBackend {
  /** The number of kernels launched since the device was opened. */
  readonly launches: number;
  /** The number of kernels that the smallest size of a function launches. */
  launchesOf(name: FunctionName): number;
  /** Bytes of the cache. */
  readonly kvMemory: number;
  /** Bytes of WebAssembly's memory, and its number of computing threads. */
  readonly held?: { readonly bytes: number; readonly threads: number };
}

/** A model on a device, whatever kind of device it is. */
export interface Loaded {
  readonly executor: ModelBackend;
  readonly program: Program;
  readonly choice: ProgramChoice;
  /** The device's own name, for messages. */
  readonly adapterName: string;
  /** The number of GPU buffers and their bytes. */
  readonly buffers: { readonly count: number; readonly bytes: number };
}
