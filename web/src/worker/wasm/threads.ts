import { namedMessage } from "../../protocol/errors.js";
import type { ThreadPort, ThreadTask, ThreadWord } from "../host.js";

/** Threads beside the first: workers of the host that each make an instance over the same memory. */

/** How long a load waits for its threads: what takes longer joins later. */
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

  /** What ended one of them. */
  get failure(): string | null {
    return this.#failure;
  }

  /** Starts a thread for each task; resolves when they run, or after a while. `onLack`: why one does not. */
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

/** More would wait for memory, and for one another. */
const MOST_THREADS = 8;

/** How many threads are worth starting on so many hardware threads: two share a core on most machines. */
export function worthStarting(hardware: number): number {
  const cores = hardware <= 2 ? hardware : Math.ceil(hardware / 2);
  return Math.max(1, Math.min(cores, MOST_THREADS));
}
