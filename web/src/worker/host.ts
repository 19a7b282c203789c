import type { Follow } from "../grammar/in-thread.js";
import type { GrammarPort } from "../grammar/words.js";
import type { Fetch } from "../storage/http.js";

/** The name by which a worker of this package knows that it is a thread. */
export const THREAD = "nearfar-thread";

export function isFirefox(): boolean {
  return /Firefox/.test(globalThis.navigator?.userAgent ?? "");
}

/** Starts another worker, or loads the code that follows grammars in this thread. */
export type StartGrammars = () => GrammarPort | Promise<Follow>;

/** Everything that a thread needs; the only message to it. */
export interface ThreadTask {
  readonly module: WebAssembly.Module;
  readonly memory: WebAssembly.Memory;
  readonly pool: number;
  /** The address of the end of its stack. */
  readonly stack: number;
}

/** A message of a thread. `failed` says that the thread is gone, together with its results. */
export type ThreadWord = { readonly type: "ready" } | { readonly type: "failed"; readonly message: string };

/** The host's end of the connection to a thread. */
export interface ThreadPort {
  start(task: ThreadTask): void;
  /** Listens to the thread; the listener also hears of a thread that does not start. */
  listen(onWord: (word: ThreadWord) => void): void;
  end(): void;
}

/** What the environment gives to the worker's code: a browser, Node, Deno, Bun. */
export interface Host {
  /** Reads files; the global `fetch` by default. */
  readonly fetch?: Fetch | undefined;
  /** Starts a thread over shared memory; null where none can be had. */
  readonly spawn: (() => ThreadPort) | null;
  /**
   * Starts a worker that follows grammars, or loads the code that does so in this thread; null if neither is
   * possible.
   */
  readonly grammars: StartGrammars | null;
  /** The number of threads that the processor runs at once. */
  readonly hardwareThreads: number;
}
