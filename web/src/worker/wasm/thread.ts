import { namedMessage } from "../../protocol/errors.js";
import type { ThreadTask, ThreadWord } from "../host.js";

/** A further thread, in a worker of its own. */

/** The exports that a thread calls. */
interface ThreadExports {
  readonly __stack_pointer: WebAssembly.Global;
  nf_pool_work(pool: number): void;
  nf_pool_fail(pool: number): void;
}

/** Runs a thread until the pool is freed. If the thread traps, `tell` reports it. */
export function work({ module, memory, pool, stack }: ThreadTask, tell: (word: ThreadWord) => void): void {
  let exports: ThreadExports | null = null;
  try {
    const instance = new WebAssembly.Instance(module, { env: { memory } });
    exports = instance.exports as unknown as ThreadExports;
    exports.__stack_pointer.value = stack;
    tell({ type: "ready" });
    exports.nf_pool_work(pool);
  } catch (error) {
    exports?.nf_pool_fail(pool);
    tell({ type: "failed", message: namedMessage(error) });
  }
}
