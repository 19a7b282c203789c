import { namedMessage } from "../../protocol/errors.js";
import type { ThreadTask, ThreadWord } from "../host.js";

/** A thread beside the first, in a worker of its own. */

/** The exports that a thread calls. */
interface ThreadExports {
  readonly __stack_pointer: WebAssembly.Global;
  nf_pool_work(pool: number): void;
  nf_pool_fail(pool: number): void;
}

/** What a thread does: it computes until the pool is freed. Whoever waits for a thread that traps is told. */
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
