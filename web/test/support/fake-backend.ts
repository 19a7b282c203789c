import type { FunctionName } from "../../src/artifact/manifest.js";
import {
  MAX_ROWS,
  MAX_STEP,
  ROW_BUCKETS,
  SAMPLE_COLUMNS,
  SAMPLE_F32,
  SAMPLE_I32,
  STEP_BUCKETS,
  TOP_LOGPROBS,
} from "../../src/format/constants.js";
import { DeviceError } from "../../src/protocol/errors.js";
import type { Backend, BackendShape, HostArray, Read } from "../../src/worker/engine/backend.js";

/**
 * A "model" in plain code behind the artifact's contract: the next token is a hash of all tokens that the
 * row's position can see through the page table. Any mistake in pages, positions, feeds or order gives
 * another text.
 */
export class FakeBackend implements Backend {
  readonly shape: BackendShape;
  readonly runs: { name: FunctionName; size: number }[] = [];
  /** Set to make every later fetch fail. */
  failure: Error | null = null;
  cannotRun: FunctionName | null = null;
  /** Whether the logits after these tokens are NaN: the sampler then writes −1. */
  notFinite: (seen: readonly number[]) => boolean = () => false;
  inFlight = 0;
  mostInFlight = 0;
  readonly #prepared = new Set<string>();
  readonly #ints: Record<string, Int32Array>;
  readonly #floats: Record<string, Float32Array>;
  /** The stored tokens, by group. */
  readonly #kv: readonly Int32Array[];

  /** `pages`: the number of each group's pages; by default as many as could ever be needed. */
  constructor(
    shape: Partial<Omit<BackendShape, "groups">> & {
      readonly pages?: number | readonly number[];
      readonly windows?: Windows;
    } = {},
  ) {
    const { pageSize = 4, slots = 16, contextLength = 128, vocabSize = 97 } = shape;
    const pagesPerSlot = Math.ceil(contextLength / pageSize);
    const { windows = [null], pages = slots * pagesPerSlot } = shape;
    const groups = windows.map((window, group) => {
      return { window, pages: typeof pages === "number" ? pages : (pages[group] ?? 0) };
    });
    this.shape = { groups, pageSize, slots, contextLength, vocabSize, pagesPerSlot };
    this.#ints = {
      tokens: new Int32Array(MAX_STEP),
      positions: new Int32Array(MAX_STEP),
      slots: new Int32Array(MAX_STEP),
      ...Object.fromEntries(
        groups.map((_, g) => [`page_table.${g}`, new Int32Array(slots * pagesPerSlot).fill(-1)]),
      ),
      logit_rows: new Int32Array(MAX_ROWS),
      sample_i32: new Int32Array(MAX_ROWS * SAMPLE_COLUMNS),
      counts: new Int32Array(slots * vocabSize),
      allowed: new Int32Array(slots * Math.ceil(vocabSize / 32)).fill(-1),
      sampled: new Int32Array(MAX_ROWS),
      top_ids: new Int32Array(MAX_ROWS * TOP_LOGPROBS),
      state: new Int32Array(MAX_ROWS),
      finite: new Int32Array(MAX_ROWS),
    };
    this.#floats = {
      sample_f32: new Float32Array(MAX_ROWS * SAMPLE_COLUMNS),
      logit_bias: new Float32Array(slots * vocabSize),
      logprob: new Float32Array(MAX_ROWS),
      top_logprobs: new Float32Array(MAX_ROWS * TOP_LOGPROBS),
      logits: new Float32Array(MAX_ROWS * vocabSize),
    };
    this.#kv = groups.map((group) => new Int32Array(group.pages * pageSize).fill(-1));
  }

  /** The logits after these tokens. */
  logitsAfter(seen: readonly number[]): number[] {
    const not = this.notFinite(seen);
    return Array.from({ length: this.shape.vocabSize }, (_, token) =>
      not && token === 1 ? Number.NaN : (hash([...seen, token]) % 1000) / 100,
    );
  }

  sizes(name: FunctionName): readonly number[] {
    return name === "step" ? STEP_BUCKETS : ROW_BUCKETS;
  }

  missing(name: FunctionName, size: number): number {
    return this.#prepared.has(`${name}.${size}`) ? 0 : 1;
  }

  async prepare(name: FunctionName, size: number, onKernel?: () => void): Promise<void> {
    await new Promise((resolve) => setTimeout(resolve, 2));
    if (name === this.cannotRun) throw new DeviceError(`${name} does not compile`);
    this.#prepared.add(`${name}.${size}`);
    onKernel?.();
  }

  write(buffer: string, data: HostArray, offset = 0): void {
    const target = this.#ints[buffer] ?? this.#floats[buffer];
    if (!target) throw new Error(`no buffer ${buffer}`);
    target.set(data, offset);
  }

  run(name: FunctionName, size: number): void {
    if (this.missing(name, size) > 0) throw new Error(`${name}.${size} runs before it is prepared`);
    this.runs.push({ name, size });
    if (name === "step") this.#step(size);
    if (name === "greedy" || name === "sample") this.#sample(name, size);
  }

  copyPage(group: number, from: number, to: number): void {
    const { pageSize } = this.shape;
    this.#kv[group]?.copyWithin(to * pageSize, from * pageSize, (from + 1) * pageSize);
  }

  async fetch(reads: readonly Read[]): Promise<HostArray[]> {
    if (this.failure) throw this.failure;
    const copies = reads.map(({ buffer, count }) => this.#buffer(buffer).slice(0, count));
    this.inFlight += 1;
    this.mostInFlight = Math.max(this.mostInFlight, this.inFlight);
    await new Promise((resolve) => setTimeout(resolve, 0));
    this.inFlight -= 1;
    return copies;
  }

  dispose(): void {
    this.failure = new Error("disposed");
  }

  #buffer(name: string): Int32Array | Float32Array {
    const found = this.#ints[name] ?? this.#floats[name];
    if (!found) throw new Error(`no buffer ${name}`);
    return found;
  }

  #int(name: string, at: number): number {
    return this.#ints[name]?.[at] ?? 0;
  }

  #cell(group: number, slot: number, position: number): number {
    const { pageSize, pagesPerSlot } = this.shape;
    const page = this.#int(`page_table.${group}`, slot * pagesPerSlot + Math.floor(position / pageSize));
    if (page < 0 || page * pageSize >= (this.#kv[group]?.length ?? 0))
      throw new Error(`position ${position} of slot ${slot} has page ${page} in group ${group}`);
    return page * pageSize + (position % pageSize);
  }

  #step(size: number): void {
    for (let row = 0; row < size; row++) {
      const position = this.#int("positions", row);
      if (position < 0) continue;
      for (const [group, kv] of this.#kv.entries())
        kv[this.#cell(group, this.#int("slots", row), position)] = this.#int("tokens", row);
    }
    for (let r = 0; r < Math.min(size, MAX_ROWS); r++) {
      const row = this.#int("logit_rows", r);
      const slot = this.#int("slots", row);
      const seen: number[] = [];
      const last = this.#int("positions", row);
      for (const [group, { window }] of this.shape.groups.entries())
        for (let p = Math.max(last + 1 - (window ?? last + 1), 0); p <= last; p++)
          seen.push(this.#kv[group]?.[this.#cell(group, slot, p)] ?? -1);
      this.#buffer("state")[r] = hash(seen);
      this.#buffer("finite")[r] = this.notFinite(seen) ? 0 : 1;
      this.#buffer("logits").set(this.logitsAfter(seen), r * this.shape.vocabSize);
    }
  }

  #sample(name: "greedy" | "sample", size: number): void {
    for (let r = 0; r < size; r++) {
      const column = (name: keyof typeof SAMPLE_I32): number =>
        this.#int("sample_i32", r * SAMPLE_COLUMNS + SAMPLE_I32[name]);
      const slot = column("slot");
      if (slot < 0) continue;
      const state = this.#int("state", r);
      const temperature = this.#floats.sample_f32?.[r * SAMPLE_COLUMNS + SAMPLE_F32.temperature] ?? 0;
      const random =
        name === "sample" && temperature > 0
          ? [column("seedLow"), column("seedHigh"), column("counter")]
          : [];
      const bias = this.#floats.logit_bias?.[slot * this.shape.vocabSize] ?? 0;
      const free = name === "sample" && bias > 0 ? 0 : nextToken(state, this.shape.vocabSize, random);
      const chosen = name === "sample" ? this.#allowed(slot, free) : free;
      const token = this.#int("finite", r) === 0 ? -1 : chosen;
      if (name === "sample" && token >= 0) this.#count(slot * this.shape.vocabSize + token);
      this.#buffer("sampled")[r] = token;
      const feed = column("feed");
      if (feed >= 0) this.#buffer("tokens")[feed] = token;
    }
  }

  /** The token, or the next one after it that its slot allows. */
  #allowed(slot: number, token: number): number {
    const { vocabSize } = this.shape;
    const words = Math.ceil(vocabSize / 32);
    for (let i = 0; i < vocabSize; i++) {
      const v = (token + i) % vocabSize;
      if ((this.#int("allowed", slot * words + (v >> 5)) >>> (v & 31)) & 1) return v;
    }
    return token;
  }

  #count(at: number): void {
    this.#buffer("counts")[at] = this.#int("counts", at) + 1;
  }
}

function hash(values: readonly number[]): number {
  return values.reduce((h, value) => Math.imul(h ^ value, 0x01000193) >>> 0, 0x811c9dc5) | 0;
}

function nextToken(state: number, vocabSize: number, random: readonly number[]): number {
  return ((hash([state, ...random]) >>> 8) % (vocabSize - 1)) + 1;
}

/** Positions that a group's layers look back, by group; null: to the beginning. */
export type Windows = readonly (number | null)[];

/** The expected answer of the model, computed without pages and steps. */
export function expectedTokens(
  prompt: readonly number[],
  count: number,
  vocabSize = 97,
  seed?: bigint,
  windows: Windows = [null],
): number[] {
  const tokens = [...prompt];
  for (let i = 0; i < count; i++) {
    const random =
      seed === undefined
        ? []
        : [Number(BigInt.asIntN(32, seed)), Number(BigInt.asIntN(32, seed >> 32n)), tokens.length];
    const seen = windows.flatMap((window) => tokens.slice(-(window ?? tokens.length)));
    tokens.push(nextToken(hash(seen), vocabSize, random));
  }
  return tokens.slice(prompt.length);
}
