import { namedMessage } from "../../protocol/errors.js";
import type { ThreadPort, ThreadTask, ThreadWord } from "../host.js";

/** Further threads: workers of the host, each with an instance over the same memory. */

/** How long a load waits for its threads; a thread that takes longer joins later. */
const PATIENCE_MS = 5_000;

/** The threads of one pool. */
export class Threads {
  readonly #ports: ThreadPort[] = [];
  #running = 0;
  #failure: string | null = null;

  /** The number of threads that run, the first one included. */
  get count(): number {
    return 1 + this.#running;
  }

  /** Why a thread ended; null while all run. */
  get failure(): string | null {
    return this.#failure;
  }

  /**
   * Starts a thread for each task; resolves when all threads run, or after PATIENCE_MS. `onLack` hears why a
   * thread does not run.
   */
  async start(
    spawn: () => ThreadPort,
    tasks: readonly ThreadTask[],
    onLack: (message: string) => void,
  ): Promise<void> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, PATIENCE_MS);
    });
    const ready = tasks.map((task) => this.#startOne(spawn, task, onLack));
    await Promise.race([Promise.all(ready), late]);
    clearTimeout(timer);
  }

  end(): void {
    for (const port of this.#ports) port.end();
    this.#ports.length = 0;
    this.#running = 0;
  }

  #startOne(spawn: () => ThreadPort, task: ThreadTask, onLack: (message: string) => void): Promise<void> {
    return new Promise((resolve) => {
      let runs = false;
      const hear = (word: ThreadWord): void => {
        if (word.type === "ready") {
          runs = true;
          this.#running += 1;
        } else if (runs) this.#failure ??= word.message;
        else onLack(word.message);
        resolve();
      };
      try {
        const port = spawn();
        this.#ports.push(port);
        port.listen(hear);
        port.start(task);
      } catch (error) {
        hear({ type: "failed", message: namedMessage(error) });
      }
    });
  }
}

/** More threads would wait for memory, and for one another. */
const MOST_THREADS = 8;

/**
 * How many threads are worth starting on `hardware` hardware threads: on most machines two of them share a
 * core.
 */
export function worthStarting(hardware: number): number {
  const cores = hardware <= 2 ? hardware : Math.ceil(hardware / 2);
  return Math.max(1, Math.min(cores, MOST_THREADS));
}
