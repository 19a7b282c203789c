/** The launches that the Python scheduler plans too; tests/vectors/schedule/README.md says what each key means. */

import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { RequestError } from "../src/protocol/errors.js";
import { SequenceTable } from "../src/worker/cache/sequence-table.js";
import { Request, type RequestListener } from "../src/worker/engine/request.js";
import { parseSampling } from "../src/worker/engine/sampling.js";
import { type ScheduledStep, Scheduler } from "../src/worker/engine/scheduler.js";
import { PromptScores } from "../src/worker/session/prompt-scores.js";

interface Config {
  readonly pages: readonly number[];
  readonly windows?: readonly (number | null)[];
  readonly page_size: number;
  readonly slots: number;
  readonly context: number;
  readonly buckets: readonly number[];
}

interface Entry {
  readonly add?: string;
  readonly prompt?: readonly (readonly [number, number])[];
  readonly limit?: number | readonly [number, number | null];
  readonly gives?: number | null;
  readonly cancel?: string;
  readonly shrink?: number;
  readonly turn?: unknown;
  readonly ahead?: unknown;
  readonly left?: readonly string[];
}

interface Scenario {
  readonly name: string;
  readonly description: string;
  readonly config: Config;
  readonly script: readonly Entry[];
}

const SCENARIOS = JSON.parse(
  readFileSync(new URL("../../tests/vectors/schedule/scenarios.json", import.meta.url), "utf8"),
) as readonly Scenario[];
const SILENT: RequestListener = { token: () => true, finish: () => undefined, fail: () => undefined };
const TOKEN = 7;

/** A scheduler that follows a script, and the requests by their names. */
class Replay {
  readonly #scheduler: Scheduler;
  readonly #requests = new Map<string, Request>();
  #flying: ScheduledStep | null = null;

  constructor({ pages, windows, page_size, slots, context, buckets }: Config) {
    const table = new SequenceTable([...pages], page_size, slots, [...(windows ?? pages.map(() => null))]);
    const sizes = buckets.map((size) => ({ size, logits: Math.min(size, slots) }));
    this.#scheduler = new Scheduler(table, sizes, context);
  }

  run(entry: Entry): Entry {
    const scheduler = this.#scheduler;
    if (entry.add !== undefined) {
      const prompt = (entry.prompt ?? []).flatMap(([first, count]) =>
        Array.from({ length: count }, (_, at) => first + at),
      );
      const params = parseSampling({ temperature: 0 }, null, 97);
      const scored = entry.limit === 0 ? new PromptScores(prompt, { tokens: [], perplexity: false }) : null;
      const request = new Request(prompt, params, Number(entry.limit), SILENT, null, scored);
      this.#requests.set(entry.add, request);
      scheduler.add(request);
      return entry;
    }
    if (entry.cancel !== undefined) {
      scheduler.remove(this.#named(entry.cancel));
      return entry;
    }
    if (entry.shrink !== undefined) {
      expect(scheduler.shrink(entry.shrink)).toBe(true);
      return { ...entry, left: this.#left() };
    }
    if (entry.turn !== undefined) {
      const step = this.#queued(null);
      if (step) this.#read(step);
      return { ...entry, turn: this.#launch(step), left: this.#left() };
    }
    if (entry.ahead !== undefined) {
      const before = this.#flying;
      this.#flying = this.#queued(before);
      if (before) this.#read(before);
      return { ...entry, ahead: this.#launch(this.#flying), left: this.#left() };
    }
    const [prompt = 0, asked = null] = entry.limit as readonly [number, number | null];
    return { ...entry, gives: this.#limit(prompt, asked) };
  }

  #limit(prompt: number, asked: number | null): number | null {
    try {
      return this.#scheduler.limitTokens(prompt, asked);
    } catch (error) {
      expect(error).toBeInstanceOf(RequestError);
      return null;
    }
  }

  #queued(before: ScheduledStep | null): ScheduledStep | null {
    const step = this.#scheduler.schedule(before);
    if (step) this.#scheduler.launched(step);
    return step;
  }

  #read(step: ScheduledStep): void {
    this.#scheduler.read(step);
    for (const request of step.sampled) {
      if (request.done) continue;
      request.pending -= 1;
      request.tokens.push(TOKEN);
      if (request.exhausted) this.#scheduler.remove(request);
    }
  }

  #named(name: string): Request {
    const request = this.#requests.get(name);
    if (!request) throw new Error(`the script has not added ${name}`);
    return request;
  }

  #nameOf(request: Request): string {
    for (const [name, each] of this.#requests) if (each === request) return name;
    throw new Error("a request without a name");
  }

  #launch(step: ScheduledStep | null): unknown {
    if (!step) return null;
    const rows = step.chunks.map(
      (chunk) => chunk && [this.#nameOf(chunk.request), chunk.start, chunk.count, chunk.samples],
    );
    return { size: step.bucket.size, rows, fed: step.fed, copies: step.copies };
  }

  #left(): string[] {
    return this.#scheduler.requests().map((request) => this.#nameOf(request));
  }
}

test.each(SCENARIOS)("$name: $description", ({ config, script }) => {
  const replay = new Replay(config);
  for (const [number, entry] of script.entries()) expect(replay.run(entry), `entry ${number}`).toEqual(entry);
});
