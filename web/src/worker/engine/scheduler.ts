import { MAX_ROWS } from "../../format/constants.js";
import { RequestError } from "../../protocol/errors.js";
import type { CachedSequence, PageCopy, SequenceTable } from "../cache/sequence-table.js";
import { isShort, keptRows, OVERTAKEN, shareRows } from "./prefill.js";
import type { Request } from "./request.js";

/** A size of `step`: its number of rows, and its rows of logits. */
export interface Bucket {
  readonly size: number;
  readonly logits: number;
}

/** Consecutive positions of one request; `null` stands for one padding row. */
export interface Chunk {
  readonly request: Request;
  readonly start: number;
  readonly count: number;
  /** Whether the last row's logits give the request's next token. */
  readonly samples: boolean;
}

/** A position of a request whose logits are read, and its row of the step. */
export interface ScoredRow {
  readonly request: Request;
  readonly position: number;
  readonly row: number;
}

export interface ScheduledStep {
  readonly bucket: Bucket;
  /**
   * The chunks in row order. The first `fed` rows are one token each, which the sampler of the step before
   * has written there.
   */
  readonly chunks: readonly (Chunk | null)[];
  readonly fed: number;
  readonly copies: readonly PageCopy[];
  /** The requests that get a token, in the order of their logits rows. */
  readonly sampled: readonly Request[];
  /** The rows whose logits are read; their rows of logits come after those of sampled requests. */
  readonly scored: readonly ScoredRow[];
  /** The requests that continue: the sampler feeds row i of the next step with the token of `feeds[i]`. */
  readonly feeds: readonly Request[];
}

/**
 * Decides what the next step computes. Running requests decode first; prompts share the room left in a step
 * (prefill.ts). When pages run out, the request that was admitted last gives its pages up and is computed
 * again later.
 */
export class Scheduler {
  readonly #waiting: Request[] = [];
  readonly #running: Request[] = [];
  /** Page copies that the next step must make first. If a plan is dropped, they remain for the next one. */
  #copies: PageCopy[] = [];

  constructor(
    private readonly table: SequenceTable,
    private buckets: readonly Bucket[],
    private readonly contextLength: number,
    /** The context length that the model allows where memory suffices. */
    private readonly modelContext: number = contextLength,
  ) {}

  /** The number of rows of the largest step. */
  get largest(): number {
    return this.buckets.at(-1)?.size ?? 0;
  }

  /**
   * Limits steps to fewer than `size` rows from now on; call it between two steps, with no token in flight.
   * Returns false, and changes nothing, if there are no smaller steps.
   */
  shrink(size: number): boolean {
    const smaller = this.buckets.filter((bucket) => bucket.size < size);
    if (smaller.length === 0) return false;
    this.buckets = smaller;
    while (this.#running.length > this.#mostRunning) this.#preempt();
    return true;
  }

  /** The most tokens that an answer may have. Throws RequestError for a prompt that leaves room for none. */
  limitTokens(promptTokens: number, maxTokens: number | null): number {
    const room = this.contextLength - promptTokens;
    if (promptTokens === 0)
      throw new RequestError("The prompt is empty, and the model has no BOS token.", "prompt");
    if (room < 1)
      throw new RequestError(
        // Clients recognize the error by OpenAI's words at its beginning; edge_runtime's message begins with
        // them too.
        `This model's maximum context length is ${this.contextLength} tokens, the answer included, but the ` +
          `prompt has ${promptTokens} tokens. ${this.#advice}`,
        "messages",
        { code: "context-overflow" },
      );
    return Math.min(maxTokens ?? room, room);
  }

  get #advice(): string {
    const shorten =
      `Shorten it to ${this.contextLength - 1} tokens or fewer, or have old turns left out ` +
      '(contextPolicy: "truncate-oldest")';
    return this.contextLength < this.modelContext
      ? `${shorten}, or load with more kvMemory or a larger contextLength: the model takes ${this.modelContext}.`
      : `${shorten}: this is the model's own limit.`;
  }

  add(request: Request): void {
    this.#waiting.push(request);
  }

  /** The sequences of requests that only hold their pages. */
  get idle(): CachedSequence[] {
    return this.#running.flatMap(({ idle, sequence }) => (idle && sequence) || []);
  }

  /** All requests that are not done. */
  requests(): Request[] {
    return [...this.#running, ...this.#waiting];
  }

  /** Forgets a request that is finished or cancelled; its full pages stay in the prefix index. */
  remove(request: Request): void {
    request.done = true;
    removeFrom(this.#running, request);
    removeFrom(this.#waiting, request);
    request.constraint?.close();
    this.#release(request);
  }

  /**
   * Plans the next step. `before` is the newest step in flight, null when every token has been read. Returns
   * null if there is nothing to do, or nothing until tokens in flight have been read.
   */
  schedule(before: ScheduledStep | null): ScheduledStep | null {
    const plan = new StepPlan(this.buckets);
    for (const request of before?.feeds ?? []) {
      if (request.done || !request.sequence) plan.pad();
      else if (this.#reserve(request, request.queued + 1, request.queued + 1, before !== null))
        plan.add(request, 1);
      else return null;
    }
    const fed = before?.feeds.length ?? 0;
    const ready = this.#ready(before, plan);
    if (!ready) return null;
    const wanted = ready.reduce((sum, request) => sum + request.remaining, 0);
    const take = plan.rowsWorthTaking(wanted);
    const decoding = ready.filter((request) => request.decodes);
    for (const request of decoding) plan.add(request, Math.min(1, fed + take - plan.rows));
    const prompts = ready.filter((request) => !request.decodes);
    const computable = prompts.map((request) => Math.min(request.remaining, this.#rowsWithPages(request)));
    const shares = shareRows(computable, fed + take - plan.rows);
    // Each other request may need a row of logits in this step.
    const room = this.#mostRunning - this.#running.filter(({ scored }) => !scored).length;
    prompts.forEach((request, at) => {
      plan.add(request, shares[at] ?? 0, room);
    });
    const step = plan.finish(fed, this.#copies);
    if (step) this.#copies = [];
    // Prompts that wait for each other's pages would wait for ever, so the last one gives its pages up.
    if (step || before || ready.length === 0 || !this.#preempt()) return step;
    return this.schedule(null);
  }

  /** Records that the device has the step: its rows are queued, and its tokens will be sampled. */
  launched(step: ScheduledStep): void {
    for (const chunk of step.chunks) {
      if (!chunk) continue;
      chunk.request.queued += chunk.count;
      if (chunk.samples) chunk.request.pending += 1;
      this.#keepBorder(chunk.request);
    }
  }

  /**
   * Records that the step has run: only now other requests may share the pages that it filled. Pages of a
   * failed step were never written, and a request that found them in the prefix index would get a wrong
   * answer.
   */
  read(step: ScheduledStep): void {
    for (const chunk of step.chunks) {
      if (!chunk?.request.sequence) continue;
      const { sequence, tokens } = chunk.request;
      chunk.request.read = chunk.start + chunk.count;
      this.table.append(sequence, tokens.slice(sequence.tokens.length, chunk.request.read));
    }
  }

  /** The most requests that can decode in one step. */
  get #mostRunning(): number {
    return this.buckets.at(-1)?.logits ?? 0;
  }

  /**
   * Requests whose next rows the host can write: running ones, then as many waiting ones as can be admitted.
   */
  #ready(before: ScheduledStep | null, plan: StepPlan): Request[] | null {
    const ready: Request[] = [];
    for (const request of [...this.#running]) {
      // The request's token is in flight: its row was fed above, or follows when that token has been read. A
      // request that samples nothing has no more rows.
      if (
        request.pending > 0 ||
        request.remaining === 0 ||
        !request.sequence ||
        before?.feeds.includes(request)
      )
        continue;
      // A constrained request waits until its allowed tokens are known; others continue meanwhile.
      if (request.held) continue;
      if (!this.#reserve(request, request.tokens.length, request.queued, before !== null)) return null;
      // The request gets its pages before others are admitted, so that these cannot take them.
      this.#advance(request, plan.maxRows);
      if (request.sequence) ready.push(request);
    }
    let wanted = ready.reduce((sum, request) => sum + request.remaining, plan.rows);
    let kept = keptRows(plan.maxRows);
    const withoutRoom: Request[] = [];
    for (const next of this.#waiting.filter(({ held }) => !held)) {
      if (this.#running.length >= this.#mostRunning && !this.#dropIdle()) break;
      const full = wanted >= plan.maxRows;
      const oldest = ready.find((request) => !request.decodes)?.remaining ?? 0;
      if (full && !(isShort(next.remaining, oldest) && next.remaining <= kept)) continue;
      if (this.#soonCached(next)) continue;
      let admitted = this.#admit(next, plan.maxRows);
      while (!admitted && this.#dropIdle()) admitted = this.#admit(next, plan.maxRows);
      if (!admitted) {
        withoutRoom.push(next);
        if (next.overtaken >= OVERTAKEN) break;
        continue;
      }
      for (const other of withoutRoom) other.overtaken += 1;
      removeFrom(this.#waiting, next);
      this.#running.push(next);
      ready.push(next);
      wanted += next.remaining;
      if (full) kept -= next.remaining;
    }
    return ready.filter((request) => request.sequence);
  }

  /**
   * Reserves pages for the next rows of a prompt as far as there is room; groups with a window get their
   * pages step by step.
   */
  #advance({ sequence, tokens, queued }: Request, rows: number): void {
    if (!sequence) return;
    const soon = this.table.reservable(sequence, Math.min(tokens.length, queued + rows));
    this.#copies.push(...(this.table.reserve(sequence, soon) ?? []));
  }

  /** Rows of a prompt that have pages. No step goes beyond the prompt's last border. */
  #rowsWithPages({ sequence, queued, tokens }: Request): number {
    if (!sequence) return 0;
    const border = this.table.border(tokens.length);
    return Math.min(this.table.writable(sequence), queued < border ? border : tokens.length) - queued;
  }

  /** What later requests need to start where the prompt ends, and then at each further page. */
  #keepBorder({ sequence, queued, tokens }: Request): void {
    if (!sequence) return;
    this.table.advance(sequence, queued);
    if (queued >= this.table.border(tokens.length)) this.table.keep(sequence);
  }

  /**
   * Reserves pages for `length` tokens, in groups with a window for `soon`; requests that were admitted later
   * may lose theirs. Returns false if tokens in flight have to be read first.
   */
  #reserve(request: Request, length: number, soon: number, inFlight: boolean): boolean {
    while (request.sequence) {
      const copies = this.table.reserve(request.sequence, length, soon);
      if (copies) {
        this.#copies.push(...copies);
        return true;
      }
      if (inFlight || !this.#preempt()) return false;
    }
    return true;
  }

  /**
   * Releases the pages of a request that only holds them, else those of the one admitted last, which waits
   * again. Returns false if none runs.
   */
  #preempt(): boolean {
    if (this.#dropIdle()) return true;
    const last = this.#running.pop();
    if (!last) return false;
    this.#release(last);
    last.queued = 0;
    this.#waiting.unshift(last);
    return true;
  }

  /** Releases the pages of a request that only holds them; false if there is none. */
  #dropIdle(): boolean {
    const idle = this.#running.find((request) => request.idle);
    if (idle) this.remove(idle);
    return !!idle;
  }

  /**
   * Opens a sequence for the request. Groups with a window reserve pages for the next rows alone, because
   * they never need the pages of all of a long prompt.
   */
  #admit(request: Request, rows: number): boolean {
    const found = this.table.open(request.tokens);
    if (!found) return false;
    const sequence = this.#borrow(request.tokens, found);
    const copies = this.table.reserve(sequence, request.tokens.length, sequence.tokens.length + rows);
    // One page stays free for each running request, which would otherwise soon preempt this one for it.
    if (!copies || this.table.groups.some((_, group) => this.table.available(group) < this.#running.length)) {
      this.table.release(sequence);
      return false;
    }
    this.#copies.push(...copies);
    request.sequence = sequence;
    request.queued = sequence.tokens.length;
    if (request.generated === 0) request.cachedTokens = request.queued;
    return true;
  }

  /** A sequence of the tokens' beginning from a running request, if it has more of them than `found`. */
  #borrow(tokens: readonly number[], found: CachedSequence): CachedSequence {
    let best: CachedSequence | null = null;
    let shared = found.tokens.length;
    for (const { sequence } of this.#running) {
      if (!sequence) continue;
      const common = Math.min(commonPrefix(sequence.tokens, tokens), tokens.length - 1);
      const most = this.table.shareable(sequence, common);
      if (most > shared) [best, shared] = [sequence, most];
    }
    if (!best) return found;
    this.table.release(found);
    return this.table.fork(best, shared) ?? found; // the slot of `found` is free
  }

  /**
   * Whether a request whose prompt is not yet read completely will leave a prefix that is worth waiting for.
   */
  #soonCached(request: Request): boolean {
    return this.#running.some((other) => {
      const read = other.sequence?.tokens.length ?? other.prompt.length;
      if (read >= other.prompt.length) return false;
      const common = this.table.leaves(other.prompt.length, commonPrefix(other.prompt, request.tokens));
      return common >= read + this.table.pageSize;
    });
  }

  #release(request: Request): void {
    if (request.sequence) this.table.release(request.sequence);
    request.sequence = null;
    request.slotReady = false;
  }
}

/** A step while it is planned. */
class StepPlan {
  readonly #chunks: (Chunk | null)[] = [];
  readonly #sampled: Request[] = [];
  readonly #scored: ScoredRow[] = [];
  rows = 0;

  constructor(private readonly buckets: readonly Bucket[]) {}

  get maxRows(): number {
    return this.buckets.at(-1)?.size ?? 0;
  }

  pad(): void {
    this.#chunks.push(null);
    this.rows += 1;
  }

  /**
   * Adds the next `count` positions of a request; fewer if no row of logits is left for the last one. Requests
   * that sample nothing share `room` rows of logits.
   */
  add(request: Request, count: number, room = 0): void {
    const start = request.queued;
    const noLogits = this.#sampled.length === (this.buckets.at(-1)?.logits ?? 0);
    const [rows, positions] = request.scored?.rows(start, count, room - this.#scored.length) ?? [
      noLogits && count === request.remaining ? count - 1 : count,
      [],
    ];
    if (rows <= 0) return;
    const samples = rows === request.remaining && !request.scored;
    this.#chunks.push({ request, start, count: rows, samples });
    if (samples) this.#sampled.push(request);
    for (const position of positions)
      this.#scored.push({ request, position, row: this.rows + position - start });
    this.rows += rows;
  }

  /**
   * How many of the wanted rows to take beside the planned ones. Padding costs as much as work, so a bucket
   * that would be more than half empty is avoided: the bucket below is filled, and the rest is left to the
   * next step. Up to MAX_ROWS rows, a step costs about one pass over the weights, full or not.
   */
  rowsWorthTaking(wanted: number): number {
    const total = Math.min(this.rows + wanted, this.maxRows);
    const size = this.buckets.find((bucket) => bucket.size >= total)?.size ?? total;
    const below = this.buckets.findLast((bucket) => bucket.size < size)?.size ?? 0;
    const fill = below >= MAX_ROWS && total * 2 <= size && below > this.rows;
    return (fill ? below : total) - this.rows;
  }

  finish(fed: number, copies: readonly PageCopy[]): ScheduledStep | null {
    if (this.#chunks.every((chunk) => chunk === null)) return null;
    const bucket = this.buckets.find(
      ({ size, logits }) => size >= this.rows && logits >= this.#sampled.length + this.#scored.length,
    );
    if (!bucket) throw new Error(`no bucket holds ${this.rows} rows`);
    // A request at its limit has its last token now, and needs no feed. The allowed tokens of a constrained
    // request depend on the sampled token, so the host feeds that token after it has been read.
    const feeds = this.#sampled.filter(
      ({ constraint, generated, limit }) => !constraint && generated + 1 < limit,
    );
    const planned = { chunks: this.#chunks, sampled: this.#sampled, scored: this.#scored };
    return { bucket, fed, copies, feeds, ...planned };
  }
}

function removeFrom<T>(list: T[], item: T): void {
  const at = list.indexOf(item);
  if (at >= 0) list.splice(at, 1);
}

function commonPrefix(a: readonly number[], b: readonly number[]): number {
  let count = 0;
  while (count < a.length && count < b.length && a[count] === b[count]) count++;
  return count;
}
