import {
  type BufferName,
  MAX_ROWS,
  PROMPT_FLAG,
  SAMPLE_COLUMNS,
  SAMPLE_F32,
  SAMPLE_I32,
} from "../../format/constants.js";
import type { Backend } from "./backend.js";
import type { Request } from "./request.js";
import { isPenalized } from "./sampling.js";
import type { ScheduledStep } from "./scheduler.js";

/** Names of the columns of `sample_f32`. */
const FLOAT_COLUMNS = Object.keys(SAMPLE_F32) as (keyof typeof SAMPLE_F32)[];

/**
 * Writes the inputs that change from step to step into the device's small buffers, and omits values that the
 * buffers already hold.
 */
export class StepInputs {
  readonly #mirrors = new Map<BufferName, Int32Array | Float32Array>();
  /** The page tables as the device holds them, by slot and group. */
  readonly #pageRows: Int32Array<ArrayBuffer>[][];
  readonly #biasedSlots = new Set<number>();
  /** The slots in which a constraint forbids some tokens. */
  readonly #constrainedSlots = new Set<number>();

  constructor(private readonly backend: Backend) {
    const { slots, groups, pagesPerSlot } = backend.shape;
    this.#pageRows = Array.from({ length: slots }, () =>
      groups.map(() => new Int32Array(pagesPerSlot).fill(-1)),
    );
  }

  /**
   * Forgets the buffers that change from step to step, because another writer has changed them. Rows of
   * biases and allowed tokens stay on the device, so the slots that have such rows stay known.
   */
  forget(): void {
    this.#mirrors.clear();
    for (const known of this.#pageRows.flat()) known.fill(-1);
  }

  /** Writes the inputs of `step`, whose requests have their pages. */
  writeStep({ bucket, chunks, fed, sampled, scored }: ScheduledStep): void {
    const positions = new Int32Array(bucket.size).fill(-1);
    const slots = new Int32Array(bucket.size);
    const logitRows = new Int32Array(bucket.logits);
    logitRows.set(
      scored.map(({ row }) => row),
      sampled.length,
    );
    const tokens: number[] = [];
    let row = 0;
    for (const chunk of chunks) {
      if (!chunk) {
        row += 1;
        continue;
      }
      const { request, start, count } = chunk;
      const slot = request.sequence?.slot ?? 0;
      for (let i = 0; i < count; i++, row++) {
        positions[row] = start + i;
        slots[row] = slot;
        if (row >= fed) tokens.push(request.tokens[start + i] ?? 0);
      }
      if (chunk.samples) logitRows[sampled.indexOf(request)] = row - 1;
      this.#writePages(request);
    }
    if (tokens.length > 0) this.backend.write("tokens", new Int32Array(tokens), fed);
    this.#writeChanged("positions", positions);
    this.#writeChanged("slots", slots);
    const used = sampled.length + scored.length;
    this.#writeChanged("logit_rows", logitRows.fill(logitRows[used - 1] ?? 0, used));
  }

  /**
   * Writes the sampler's inputs for a step whose sampling has `rows` rows. Greedy sampling reads only the
   * slot and the feed.
   */
  writeSampling({ sampled, feeds }: ScheduledStep, rows: number, greedy: boolean): void {
    const ints = new Int32Array(rows * SAMPLE_COLUMNS);
    const floats = new Float32Array(rows * SAMPLE_COLUMNS);
    for (let row = 0; row < rows; row++) {
      const request = sampled[row];
      const at = row * SAMPLE_COLUMNS;
      ints[at + SAMPLE_I32.slot] = request ? (request.sequence?.slot ?? 0) : -1;
      ints[at + SAMPLE_I32.feed] = request ? feeds.indexOf(request) : -1;
      if (request && !greedy) this.#describe(request, ints, floats, at);
    }
    this.#writeChanged("sample_i32", ints);
    if (!greedy) this.#writeChanged("sample_f32", floats);
  }

  #describe(request: Request, ints: Int32Array, floats: Float32Array, at: number): void {
    const { params, sequence } = request;
    const slot = sequence?.slot ?? 0;
    this.#prepareSlot(request, slot);
    this.#allow(request, slot);
    // The sampled token comes after the tokens that this step completes.
    const counter = request.queued + request.remaining;
    ints[at + SAMPLE_I32.topK] = params.topK;
    ints[at + SAMPLE_I32.seedLow] = Number(BigInt.asIntN(32, params.seed));
    ints[at + SAMPLE_I32.seedHigh] = Number(BigInt.asIntN(32, params.seed >> 32n));
    ints[at + SAMPLE_I32.counter] = counter;
    for (const name of FLOAT_COLUMNS) floats[at + SAMPLE_F32[name]] = params[name];
  }

  /** Writes the bias and the counts of a request that has just got its slot. */
  #prepareSlot(request: Request, slot: number): void {
    if (request.slotReady) return;
    request.slotReady = true;
    const { vocabSize } = this.backend.shape;
    const { params, tokens, prompt } = request;
    if (params.logitBias.size > 0 || this.#biasedSlots.delete(slot)) {
      const bias = new Float32Array(vocabSize);
      for (const [token, value] of params.logitBias) bias[token] = value;
      this.backend.write("logit_bias", bias, slot * vocabSize);
      if (params.logitBias.size > 0) this.#biasedSlots.add(slot);
    }
    // Without penalties the sampler's result does not depend on the counts, whatever an earlier request has
    // left there.
    if (!isPenalized(params)) return;
    const counts = new Int32Array(vocabSize);
    for (const token of prompt) counts[token] = PROMPT_FLAG;
    for (const token of tokens.slice(prompt.length)) counts[token] = (counts[token] ?? 0) + 1;
    this.backend.write("counts", counts, slot * vocabSize);
  }

  /**
   * Writes which tokens a request may take: at each step for a constrained request, and once for the next
   * request without a constraint in the same slot.
   */
  #allow({ allowed }: Request, slot: number): void {
    const words = Math.ceil(this.backend.shape.vocabSize / 32);
    if (allowed) {
      this.backend.write("allowed", allowed, slot * words);
      this.#constrainedSlots.add(slot);
    } else if (this.#constrainedSlots.delete(slot)) {
      this.backend.write("allowed", new Uint32Array(words).fill(0xffffffff), slot * words);
    }
  }

  #writePages({ sequence }: Request): void {
    if (!sequence) return;
    const { slot } = sequence;
    const { pagesPerSlot } = this.backend.shape;
    for (const [group, { first, pages }] of sequence.held.entries()) {
      const known = this.#pageRows[slot]?.[group];
      // Entries of pages that were given back go stale, and no row reads them.
      const same = pages.findIndex((page, i) => known?.[first + i] !== page);
      if (!known || same < 0) continue;
      const changed = Int32Array.from(pages.slice(same));
      known.set(changed, first + same);
      this.backend.write(`page_table.${group}`, changed, slot * pagesPerSlot + first + same);
    }
  }

  #writeChanged(buffer: BufferName, data: Int32Array<ArrayBuffer> | Float32Array<ArrayBuffer>): void {
    const known = this.#mirrors.get(buffer);
    if (known && known.length >= data.length && data.every((value, i) => known[i] === value)) return;
    this.backend.write(buffer, data);
    // After a shorter write, the values behind it are still on the device, but they are not worth tracking.
    this.#mirrors.set(buffer, data);
  }
}

/**
 * Writes the inputs of a step that runs only to be timed: one token at each of the positions of the first
 * slot's sequence, with nothing fed to a later step. The caller writes the page table.
 */
export function writePlainStep(backend: Backend, positions: Int32Array<ArrayBuffer>): void {
  const rows = positions.length;
  const sample = new Int32Array(MAX_ROWS * SAMPLE_COLUMNS);
  for (let row = 0; row < MAX_ROWS; row++) sample[row * SAMPLE_COLUMNS + SAMPLE_I32.feed] = -1;
  backend.write("tokens", new Int32Array(rows));
  backend.write("positions", positions);
  backend.write("slots", new Int32Array(rows));
  backend.write("logit_rows", new Int32Array(MAX_ROWS));
  if (!backend.shape.embedding) backend.write("sample_i32", sample);
}
