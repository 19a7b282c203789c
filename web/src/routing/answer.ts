/**
 * One answer on its way: through the side that was chosen, and the other where that one fails or loses its thread. What the
 * caller has is never taken back and never given again.
 */

import { CloudError, DeviceError, throwIfAborted } from "../errors.js";
import { failureOf, isRequestError } from "./device.js";
import { firstUseful } from "./hedge.js";
import { ends, isUseful, type Leg, type Piece, tokensIn, tokensOf } from "./leg.js";
import {
  type Chunk,
  type ChunkChoice,
  continued,
  type FinishReason,
  type HybridRequest,
  type Logprobs,
  type RouteInfo,
  type Usage,
} from "./openai.js";
import { backoff } from "./retry.js";
import type { Plan, Router, Ticket } from "./router.js";
import { type Reason, reason, type Side } from "./types.js";
import { pause } from "./wait.js";
import { Watch } from "./watch.js";

/** What no second try changes. */
const FINAL = ["401", "403", "404", "shape"];

/** One side's part, as it is accounted for. */
interface Attempt {
  readonly ticket: Ticket;
  readonly leg: Leg;
  /** Tokens of the answer before this part, and in it. */
  readonly before: number;
  count: number;
  usage: Usage | null;
  readonly asked: number;
  first: number;
  last: number;
}

export class Answer {
  readonly #request: HybridRequest;
  readonly #controller = new AbortController();
  readonly #head: Pick<Chunk, "id" | "object" | "created" | "model">;
  readonly #started = performance.now();
  readonly #attempts: Attempt[] = [];
  readonly #path: Side[] = [];
  readonly #reasons: Reason[];
  readonly #failures: Record<Side, number> = { device: 0, cloud: 0 };
  #degraded: boolean;
  /** Text and tokens that the caller has. */
  #text = "";
  #count = 0;
  #plain: boolean;
  #finish: FinishReason | null = null;
  #spent = 0;
  #escalated = false;
  #watch: Watch | null = null;
  #hasLogprobs = true;
  #first: number | null = null;

  constructor(
    private readonly router: Router,
    request: HybridRequest,
    private readonly plan: Plan,
  ) {
    const { max_completion_tokens: _, ...rest } = request;
    // The limit that the decision counted on.
    this.#request = { ...rest, max_tokens: plan.request.max_tokens };
    this.#reasons = [...plan.decision.reasons];
    this.#degraded = plan.decision.degraded;
    this.#plain = !request.tools?.length && (request.response_format?.type ?? "text") === "text";
    const created = Math.floor(Date.now() / 1000);
    this.#head = { id: `chatcmpl-${plan.id}`, object: "chat.completion.chunk", created, model: "" };
    const { signal } = request;
    const abort = (): void => this.#controller.abort();
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort, { once: true, signal: this.#controller.signal });
  }

  /** Where the answer comes from, as far as it is known; whole with its last chunk. */
  get info(): RouteInfo {
    const { decision, would, id } = this.plan;
    return {
      decision_id: id,
      route: this.#path.at(-1) ?? decision.route ?? "device",
      path: [...this.#path],
      reasons: [...this.#reasons],
      degraded: this.#degraded,
      predicted: decision.predicted,
      spent: this.#spent,
      saved: this.#path.length > 0 ? Math.max(this.router.price(this.plan, this.usage) - this.#spent, 0) : 0,
      would_route: would?.route ?? null,
    };
  }

  /** Tokens of the whole answer, wherever its parts came from. */
  get usage(): Usage {
    const parts = this.#attempts.filter(({ count }) => count > 0);
    const { usage = null } = (parts.length === 1 && parts[0]) || {};
    if (usage) return usage;
    const { prompt_tokens } = this.plan.request;
    return { prompt_tokens, completion_tokens: this.#count, total_tokens: prompt_tokens + this.#count };
  }

  /** The chunks. The last one ends the answer; after it comes one with the usage, where the request asks for that. */
  async *chunks(): AsyncGenerator<Chunk> {
    let failure: unknown = null;
    try {
      throwIfAborted(this.#controller.signal);
      let leg: Attempt | null = await this.#begin();
      while (leg) {
        const next: Ticket | null = yield* this.#follow(leg);
        leg = next && this.#open(next);
      }
      const end = { index: 0, delta: {}, finish_reason: this.#finish ?? "stop", logprobs: null };
      this.router.remember(this.plan, this.#path.at(-1) ?? "device", this.usage.total_tokens);
      yield { ...this.#head, choices: [end], x_nearfar: this.info };
      if (this.#request.stream_options?.include_usage)
        yield { ...this.#head, choices: [], usage: this.usage, x_nearfar: this.info };
    } catch (error) {
      failure = error;
      throw error;
    } finally {
      this.#controller.abort();
      for (const attempt of this.#attempts) this.#leave(attempt, "left");
      this.router.leave(this.plan.ticket, this.plan, "left", null);
      this.#record(failure);
    }
  }

  #open(ticket: Ticket): Attempt {
    const { side } = ticket;
    const request = continued(this.#request, this.#text, this.#count);
    const watch =
      side === "device" && this.#mayEscalate ? new Watch(this.plan.policy.monitor, this.#hasLogprobs) : null;
    this.#watch = watch ?? this.#watch;
    const leg = this.router.open(ticket, watch?.request(request) ?? request, this.plan, this.#signal);
    const times = { asked: performance.now(), first: 0, last: 0 };
    const attempt = { ticket, leg, before: this.#count, count: 0, usage: null, ...times };
    this.#attempts.push(attempt);
    return attempt;
  }

  async #begin(): Promise<Attempt> {
    const { decision, policy, ticket } = this.plan;
    const first = this.#open(ticket);
    const { hedge_seconds, shadow } = policy;
    const other = decision.fallback;
    if (hedge_seconds === null || other === null || shadow !== null) return first;
    let second: Attempt | null = null;
    const start = (): Leg | null => {
      const admitted = this.router.admit(this.plan, other, false);
      if (!admitted) return null;
      this.#reasons.push(reason("hedged", other, hedge_seconds));
      second = this.#open(admitted);
      return second.leg;
    };
    const leg = await firstUseful(first.leg, start, hedge_seconds, this.#signal);
    // Narrowing does not see the assignment in `start`.
    const winner = leg.side === other ? ((second as Attempt | null) ?? first) : first;
    for (const attempt of this.#attempts) if (attempt !== winner) this.#leave(attempt, "left");
    const hedged = { ...winner, leg };
    this.#attempts[this.#attempts.indexOf(winner)] = hedged;
    return hedged;
  }

  get #signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** Passes a side's pieces on. Gives the ticket of the side that goes on, or null when the answer is complete. */
  async *#follow(attempt: Attempt): AsyncGenerator<Chunk, Ticket | null> {
    const { leg } = attempt;
    const restarts = this.plan.policy.escalation === "restart";
    let hold = this.#hold;
    const held: Piece[] = [];
    let seen = 0;
    try {
      for await (const piece of leg.pieces) {
        this.#measure(attempt, piece);
        const low = leg.side === "device" ? (this.#watch?.push(piece) ?? null) : null;
        if (low) {
          this.#reasons.push(low);
          if (this.#watch) this.#watch.on = false;
          this.#escalated = true;
          hold = 0;
          const replaced = restarts && this.#count === 0;
          if (!replaced) for (const shown of held.splice(0)) yield* this.#emit(leg.side, shown);
          const ticket = this.#admit("cloud");
          if (ticket) {
            this.#leave(attempt, "left");
            return ticket;
          }
          // The cloud was wanted.
          this.#degraded = true;
        }
        seen += tokensIn(piece);
        held.push(piece);
        if (seen < hold && !ends(piece)) continue;
        for (const shown of held.splice(0)) yield* this.#emit(leg.side, shown);
      }
      this.#leave(attempt, "ok");
      return null;
    } catch (error) {
      throwIfAborted(this.#signal);
      this.#leave(attempt, error instanceof Error ? error : new Error(String(error)));
      return await this.#after(attempt.ticket.side, error);
    } finally {
      leg.abort();
    }
  }

  /** Who goes on after a side failed. What the device refuses the cloud may take, if nothing is shown yet. */
  async #after(side: Side, error: unknown): Promise<Ticket | null> {
    if (this.#finish !== null) return null;
    if (this.#count >= this.plan.request.max_tokens) {
      this.#finish = "length";
      return null;
    }
    if (isRequestError(error)) return this.#afterRefusal(side, error as Error);
    if (!(error instanceof CloudError || error instanceof DeviceError)) throw error;
    this.#failures[side] += 1;
    this.#reasons.push(
      reason(this.#count > 0 ? "cut" : "failed", side, error instanceof CloudError ? error.reason : failureOf(error)),
    );
    for (const next of this.#order(side)) {
      if (next === side && !(await this.#mayRetry(error))) continue;
      const ticket = this.#admit(next);
      if (!ticket) continue;
      this.#degraded ||= side === "cloud" && next === "device";
      return ticket;
    }
    throw error;
  }

  #afterRefusal(side: Side, error: Error): Ticket {
    if (side === "cloud" || this.#count > 0) throw error;
    // An artifact without logprobs: the monitor wanted them, not the caller.
    const unwatched =
      (error as { param?: unknown }).param === "logprobs" && !this.#request.logprobs && this.#hasLogprobs;
    this.#hasLogprobs &&= !unwatched;
    const ticket = this.#admit(unwatched ? "device" : "cloud");
    if (!ticket) throw error;
    if (!unwatched) this.#reasons.push(reason("refused", "device", error.message));
    return ticket;
  }

  /** Who is asked next, in order. A device that failed is not asked again, a cloud that failed only as a retry. */
  #order(failed: Side): Side[] {
    if (failed === "device") return this.#failures.cloud > 0 ? [] : ["cloud"];
    const { after_cut, retry } = this.plan.policy;
    const again = this.#count > 0 ? after_cut === "cloud" : this.#failures.cloud <= retry.before_fallback;
    const device: Side[] = this.#failures.device > 0 ? [] : ["device"];
    return again ? ["cloud", ...device] : [...device, "cloud"];
  }

  /** Waits for a retry, if the policy and the budget have one left. */
  async #mayRetry(error: Error): Promise<boolean> {
    if (!(error instanceof CloudError) || FINAL.includes(error.reason)) return false;
    const random = (this.router.options.random ?? Math.random)();
    const wait = backoff(this.#failures.cloud - 1, random, error.retryAfter, this.plan.policy.retry);
    if (wait === null || !this.router.retries.withdraw()) return false;
    await pause(wait, this.#signal);
    return true;
  }

  /** Lets a side take over, if the answer can go on there at all. */
  #admit(side: Side): Ticket | null {
    if (this.#count > 0 && !this.#plain) return null;
    return this.router.admit(this.plan, side, this.#text !== "");
  }

  // What the device's monitor does.

  get #mayEscalate(): boolean {
    const { decision, policy } = this.plan;
    const wanted = policy.escalation !== "off" && policy.shadow === null;
    return wanted && !this.#escalated && decision.fallback === "cloud";
  }

  /** Tokens of a watched answer that are held back at its beginning, while it can be restarted unseen. */
  get #hold(): number {
    const { escalation, hold_tokens } = this.plan.policy;
    if (!this.#watch?.on) return 0;
    // A whole answer is shown at its end only, so all of it can be replaced.
    return escalation === "restart" && !this.#request.stream ? Number.POSITIVE_INFINITY : hold_tokens;
  }

  // What is shown and noted on the way.

  *#emit(side: Side, { choices, model }: Piece): Generator<Chunk> {
    const [choice] = choices;
    if (!choice || this.#finish !== null) return;
    this.#finish = choice.finish_reason ?? null;
    const logprobs = this.#asked(choice.logprobs ?? null);
    const { role: _, ...delta } = choice.delta;
    if (this.#path.length === 0 && (isUseful(choice) || logprobs?.content?.length)) {
      this.#path.push(side);
      this.#head.model = model;
      yield this.#chunk({ delta: { role: "assistant", content: "" } }, this.info);
    }
    if (!isUseful({ ...choice, finish_reason: null }) && !logprobs?.content?.length) {
      this.#count += tokensOf(choice);
      return;
    }
    if (this.#path.at(-1) !== side) this.#path.push(side);
    this.#first ??= performance.now();
    this.#text += delta.content ?? "";
    this.#count += tokensOf(choice);
    this.#plain &&= !delta.tool_calls && !delta.reasoning_content;
    yield this.#chunk({ delta, logprobs });
  }

  /** The logprobs that the caller asked for; the monitor may have had more. */
  #asked(logprobs: Logprobs | null): Logprobs | null {
    if (!this.#request.logprobs || !logprobs) return null;
    const most = this.#request.top_logprobs ?? 0;
    const content = logprobs.content.map((token) => ({ ...token, top_logprobs: token.top_logprobs.slice(0, most) }));
    return { content };
  }

  #chunk(choice: Pick<ChunkChoice, "delta"> & Partial<ChunkChoice>, info?: RouteInfo): Chunk {
    const choices = [{ index: 0, finish_reason: null, logprobs: null, ...choice }];
    return { ...this.#head, choices, ...(info && { x_nearfar: info }) };
  }

  #measure(attempt: Attempt, piece: Piece): void {
    attempt.usage = piece.usage ?? attempt.usage;
    const tokens = tokensIn(piece);
    if (tokens === 0) return;
    attempt.count += tokens;
    attempt.last = performance.now();
    attempt.first ||= attempt.last;
  }

  /** Settles an attempt once, and learns from it. One that failed before it gave anything is not charged for. */
  #leave(attempt: Attempt, outcome: "ok" | "left" | Error): void {
    const { ticket, before, count, usage, asked, first, last } = attempt;
    if (ticket.ended) return;
    attempt.leg.abort();
    const prompt = usage?.prompt_tokens ?? this.plan.request.prompt_tokens + before;
    const used = usage ?? { prompt_tokens: prompt, completion_tokens: count, total_tokens: prompt + count };
    // Where the caller left, the prompt may have been computed.
    const charged = usage || count > 0 || outcome === "left";
    this.#spent += this.router.leave(ticket, this.plan, outcome, charged ? used : null);
    if (outcome !== "ok" || first === 0) return;
    const { speeds, warm } = this.router;
    const fresh = prompt - (usage?.prompt_tokens_details?.cached_tokens ?? 0);
    if (ticket.side === "cloud") speeds.cloud.firstToken((first - asked) / 1000, fresh);
    else if (warm) speeds.device.prefill(fresh, (first - asked) / 1000);
    if (ticket.side === "cloud" || warm) speeds[ticket.side].decode(count - 1, (last - first) / 1000);
    this.router.warm ||= ticket.side === "device";
  }

  #record(failure: unknown): void {
    const { id, request, device, cloud, policy, decision, would } = this.plan;
    const left = this.#finish === null && (failure === null || isAbort(failure));
    const { spent, saved, path, degraded, reasons, route } = this.info;
    const { prompt_tokens, completion_tokens } = this.usage;
    this.router.records.add({
      id,
      time: new Date(this.#head.created * 1000).toISOString(),
      request,
      device,
      cloud,
      policy: { mode: policy.mode, difficulty_threshold: policy.difficulty_threshold },
      decision,
      would,
      outcome: {
        route: path.length > 0 ? route : null,
        path,
        degraded,
        reasons,
        ttft: this.#first && (this.#first - this.#started) / 1000,
        seconds: (performance.now() - this.#started) / 1000,
        prompt_tokens,
        completion_tokens,
        spent,
        saved,
        finish: this.#finish,
        lowest_logprob: this.#watch?.monitor.lowestLogprob ?? null,
        highest_entropy: this.#watch?.monitor.highestEntropy ?? null,
        error: left ? "stopped" : failure === null ? null : nameOf(failure),
      },
      ...(policy.record_text && !request.private && { text: { messages: this.#request.messages, answer: this.#text } }),
    });
  }
}

function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

/** The kind of an error, for records: its message may quote the prompt. */
function nameOf(error: unknown): string {
  return error instanceof Error ? error.name : "unknown";
}
