/**
 * One answer on its way: the route's side writes; where it fails or loses its thread, the other side goes on from the text so
 * far; the caller sees one stream in which nothing comes twice.
 */

import { CloudError, DeviceError, throwIfAborted } from "../errors.js";
import { isRequestError } from "./device.js";
import { type Failure, firstUseful } from "./hedge.js";
import { isUseful, type Leg, type Piece, tokensOf } from "./leg.js";
import { Monitor, type WatchedToken } from "./monitor.js";
import { type Chunk, type ChunkChoice, continued, type HybridRequest, type RouteInfo, type Usage } from "./openai.js";
import { noRoute } from "./reasons.js";
import { backoff } from "./retry.js";
import type { Plan, Router } from "./router.js";
import { type Reason, reason, type Side } from "./types.js";
import { pause } from "./wait.js";

/** Alternatives a token, where the entropy is watched: what is beyond them counts as one more token. */
const WATCHED_ALTERNATIVES = 10;

export class Answer {
  /** As it was asked, with the limit that the decision counted on. */
  private readonly request: HybridRequest;
  readonly #controller = new AbortController();
  readonly #path: Side[] = [];
  readonly #reasons: Reason[];
  readonly #head: Pick<Chunk, "id" | "object" | "created" | "model">;
  /** Ends of choices: they go out last, when the cost is known. */
  readonly #ends = new Map<number, ChunkChoice>();
  readonly #started = performance.now();
  #degraded: boolean;
  #opened = false;
  /** Text and tokens that the caller has. */
  #text = "";
  #seen = 0;
  #spent = 0;
  #retries = 0;
  #watching: boolean;
  #monitor: Monitor | null = null;
  #first: number | null = null;
  #last = 0;
  /** Of the side that writes now: tokens before it, when it was asked, its first token, its usage. */
  #leg = { before: 0, asked: 0, first: null as number | null, usage: null as Usage | null };

  constructor(
    private readonly router: Router,
    request: HybridRequest,
    private readonly plan: Plan,
  ) {
    const { max_completion_tokens: _, ...rest } = request;
    this.request = { ...rest, max_tokens: plan.request.max_tokens };
    this.#reasons = [...plan.route.reasons];
    this.#degraded = plan.route.degraded;
    this.#watching = plan.policy.escalation !== "off" && this.#plain;
    const created = Math.floor(Date.now() / 1000);
    this.#head = { id: `chatcmpl-${plan.id}`, object: "chat.completion.chunk", created, model: "" };
    const { signal } = request;
    if (signal?.aborted) this.#controller.abort();
    else
      signal?.addEventListener("abort", () => this.#controller.abort(), {
        once: true,
        signal: this.#controller.signal,
      });
  }

  /** Where the answer came from, as far as it is known. */
  get info(): RouteInfo {
    const { route: done, decision, policy } = this.plan;
    const { predicted, route } = done;
    const { prompt_tokens, completion_tokens } = this.usage;
    const whole = this.router.cost(prompt_tokens, completion_tokens, this.plan);
    return {
      decision_id: this.plan.id,
      route: this.#path.at(-1) ?? route ?? "device",
      path: [...this.#path],
      reasons: [...this.#reasons],
      degraded: this.#degraded,
      predicted,
      spent: this.#spent,
      saved: Math.max(whole - this.#spent, 0),
      would_route: policy.shadow === null ? null : decision.route,
    };
  }

  /** The chunks. The last ones end the choices; after them comes one with the usage, where the request asks for it. */
  async *chunks(): AsyncGenerator<Chunk> {
    let finish = "aborted";
    let failure: unknown = null;
    try {
      let leg = await this.#begin();
      for (;;) {
        const failed = yield* this.#follow(leg);
        if (failed === null) break;
        const next = await this.#change(leg.side, failed);
        if (next === null) break;
        leg = next;
      }
      finish = this.#ends.get(0)?.finish_reason ?? "stop";
      const tokens = this.usage.total_tokens;
      this.router.answered(this.plan, this.#path, tokens);
      for (const end of this.#ends.values()) yield { ...this.#head, choices: [end], x_nearfar: this.info };
      if (this.request.stream_options?.include_usage)
        yield { ...this.#head, choices: [], usage: this.usage, x_nearfar: this.info };
    } catch (error) {
      if (!this.#controller.signal.aborted) {
        finish = "error";
        failure = error;
      }
      throw error;
    } finally {
      this.#controller.abort();
      this.#record(finish, failure);
    }
  }

  /** Tokens of the request's own prompt, and of all that was written. */
  get usage(): Usage {
    const { usage, before } = this.#leg;
    const prompt_tokens = usage ? Math.max(usage.prompt_tokens - before, 0) : this.plan.request.prompt_tokens;
    const completion_tokens = before + (usage?.completion_tokens ?? this.#seen - before);
    return { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens };
  }

  /** Whether the text so far says all that another side must know: one answer of plain text. */
  get #plain(): boolean {
    const { n, tools, response_format } = this.request;
    return (n ?? 1) === 1 && !tools?.length && (response_format ?? { type: "text" }).type === "text";
  }

  get #signal(): AbortSignal {
    return this.#controller.signal;
  }

  #begin(): Promise<Leg> | Leg {
    const { route, fallback, reasons } = this.plan.route;
    throwIfAborted(this.#signal);
    if (route === null) throw noRoute(reasons);
    const { hedge_seconds } = this.plan.policy;
    const first = this.#open(route);
    if (hedge_seconds === null || fallback === null) return first;
    return this.#hedge(first, fallback, hedge_seconds);
  }

  async #hedge(first: Leg, other: Side, seconds: number): Promise<Leg> {
    const leg = this.#leg;
    const winner = await firstUseful(first, () => this.#open(other), seconds, this.#signal);
    if (winner.side === first.side) this.#leg = leg;
    // The one that answers is the one that counts.
    this.#path.length = 0;
    this.#path.push(winner.side);
    if (winner.side !== first.side) this.#reasons.push(reason("hedged", winner.side));
    return winner;
  }

  #open(side: Side): Leg {
    const { policy } = this.plan;
    const request = { ...continued(this.request, this.#text, this.#seen) };
    if (side === "device" && this.#watching) {
      this.#monitor = new Monitor(policy.monitor);
      const { logprob, entropy } = policy.monitor;
      if (logprob !== null || entropy !== null) {
        request.logprobs = true;
        const alternatives = entropy === null ? 0 : WATCHED_ALTERNATIVES;
        request.top_logprobs = Math.max(this.request.top_logprobs ?? 0, alternatives);
      }
    }
    this.#path.push(side);
    this.#leg = { before: this.#seen, asked: performance.now(), first: null, usage: null };
    return this.router.open(side, request, this.plan, this.#signal);
  }

  /** Passes a side's pieces on. Gives why it cannot go on, or null when the answer is complete. */
  async *#follow(leg: Leg): AsyncGenerator<Chunk, Failure | null> {
    const held: Piece[] = [];
    let holding = leg.side === "device" && this.#watching && !this.#opened ? this.plan.policy.hold_tokens : 0;
    let written = 0;
    try {
      for await (const piece of leg.pieces) {
        this.#measure(piece);
        const low = leg.side === "device" ? this.#watch(piece) : null;
        if (low !== null) return { reason: low };
        written += piece.choices.reduce((sum, choice) => sum + tokensOf(choice), 0);
        held.push(piece);
        if (written < holding && !piece.choices.some(({ finish_reason }) => finish_reason)) continue;
        holding = 0;
        for (const ready of held.splice(0)) yield* this.#emit(ready);
      }
    } catch (error) {
      throwIfAborted(this.#signal);
      return { error };
    } finally {
      leg.abort();
      this.#settle(leg.side);
    }
    return null;
  }

  /** The next side, after one failed or lost its thread; null where nothing is left to write. Throws where there is no way on. */
  async #change(from: Side, failure: Failure): Promise<Leg | null> {
    if (this.#seen >= this.plan.request.max_tokens) {
      this.#ends.set(0, { index: 0, delta: {}, finish_reason: "length", logprobs: null });
      return null;
    }
    if ("reason" in failure) {
      this.#watching = false;
      this.#reasons.push(failure.reason);
      return this.#open("cloud");
    }
    const { error } = failure;
    if (isRequestError(error)) return this.#unwatched(error);
    // Tool calls and several answers cannot be taken over in the middle.
    if (this.#opened && !this.#plain) throw error;
    const message = error instanceof Error ? error.message : String(error);
    const code = from === "device" ? "lost" : this.#opened ? "cut" : "failed";
    this.#reasons.push(reason(code, from, message));
    if (from === "device") return this.#takeOver("cloud", error);
    const cloudFirst = this.#opened && this.plan.policy.after_cut === "cloud";
    const deviceCan = this.router.blocks(this.plan).device.length === 0;
    // Before its first word, a cloud that failed for a moment gets another chance, unless waiting is worse than the device.
    const again = error instanceof CloudError && error.passing && (cloudFirst || !this.#opened || !deviceCan);
    if (again && (await this.#mayRetry(error, deviceCan))) return this.#open("cloud");
    this.#degraded = true;
    return this.#takeOver("device", error);
  }

  #takeOver(to: Side, error: unknown): Leg {
    const possible = !(to === "cloud" && this.#opened && !this.router.continuesInCloud);
    if (!possible || this.router.blocks(this.plan)[to].length > 0) throw error;
    return this.#open(to);
  }

  /** Waits as long as it takes to try the cloud again. False: it should not be tried. */
  async #mayRetry(error: CloudError, deviceCan: boolean): Promise<boolean> {
    if (this.#opened && !this.router.continuesInCloud) return false;
    if (deviceCan && (error.retryAfter ?? 0) > 0) return false;
    const random = (this.router.options.random ?? Math.random)();
    const wait = backoff(this.#retries, random, error.retryAfter, this.plan.policy.retry);
    if (wait === null || !this.router.retries.withdraw()) return false;
    this.#retries += 1;
    await pause(wait, this.#signal);
    return this.router.blocks(this.plan).cloud.length === 0;
  }

  /** Artifacts without logprobs refuse requests for them; the caller did not ask. */
  #unwatched(error: unknown): Leg {
    const param = (error as { param?: unknown }).param;
    if (!this.#watching || this.request.logprobs || param !== "logprobs" || this.#opened) throw error;
    this.#watching = false;
    this.#path.pop();
    return this.#open("device");
  }

  /** What the monitor says of a piece, where the cloud could go on. */
  #watch({ choices }: Piece): Reason | null {
    const monitor = this.#watching ? this.#monitor : null;
    const [choice] = choices;
    if (!monitor || !choice) return null;
    const scores = choice.logprobs?.content ?? [];
    const text = choice.delta.content ?? "";
    const tokens: WatchedToken[] = scores.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      top: top_logprobs.map((other) => other.logprob),
    }));
    if (scores.length === 0 && text !== "") tokens.push({ text, logprob: null, top: [] });
    for (const token of tokens) {
      const low = monitor.push(token);
      if (low !== null && this.#canEscalate()) return low;
    }
    return null;
  }

  #canEscalate(): boolean {
    // A restart replaces what nobody has seen; what was shown stays.
    if (this.#opened && (this.plan.policy.escalation === "restart" || !this.router.continuesInCloud)) return false;
    return this.router.blocks(this.plan).cloud.length === 0;
  }

  *#emit({ choices, model }: Piece): Generator<Chunk> {
    if (this.#head.model === "") this.#head.model = model;
    for (const choice of choices) {
      if (!isUseful(choice) && !choice.logprobs?.content?.length) continue;
      if (!this.#opened) yield* this.#opening();
      if (this.#ends.has(choice.index)) continue;
      const { index, finish_reason } = choice;
      const { role: _, ...delta } = choice.delta;
      const logprobs = this.request.logprobs ? (choice.logprobs ?? null) : null;
      if (index === 0) this.#text += delta.content ?? "";
      this.#seen += tokensOf(choice);
      if (finish_reason) this.#ends.set(index, { index, delta: {}, finish_reason, logprobs: null });
      const says = isUseful({ index, delta, finish_reason: null }) || logprobs?.content?.length;
      if (says) yield { ...this.#head, choices: [{ index, delta, finish_reason: null, logprobs }] };
    }
  }

  *#opening(): Generator<Chunk> {
    this.#opened = true;
    for (let index = 0; index < (this.request.n ?? 1); index++) {
      const delta = { role: "assistant", content: "" } as const;
      const choices = [{ index, delta, finish_reason: null, logprobs: null }];
      yield { ...this.#head, choices, ...(index === 0 && { x_nearfar: this.info }) };
    }
  }

  #measure({ choices, usage }: Piece): void {
    if (usage) this.#leg.usage = usage;
    if (!choices.some((choice) => tokensOf(choice) > 0)) return;
    this.#last = performance.now();
    this.#leg.first ??= this.#last;
    this.#first ??= this.#last;
  }

  /** Learns from a side's part: how fast it was, and what it cost. */
  #settle(side: Side): void {
    const { before, asked, first, usage } = this.#leg;
    if (first === null) return;
    const speeds = this.router.speeds[side];
    const prompt = usage?.prompt_tokens ?? this.plan.request.prompt_tokens + before;
    const written = usage?.completion_tokens ?? this.#seen - before;
    const fresh = prompt - (usage?.prompt_tokens_details?.cached_tokens ?? 0);
    if (side === "device" && this.router.warm) speeds.prefill(fresh, (first - asked) / 1000);
    else if (side === "cloud") speeds.firstToken((first - asked) / 1000, fresh);
    if (side === "cloud" || this.router.warm) speeds.decode(written - 1, (this.#last - first) / 1000);
    this.router.warm ||= side === "device";
    if (side === "cloud") this.#spent += this.router.cost(prompt, written, this.plan);
  }

  #record(finish: string, failure: unknown): void {
    const { id, request, device, cloud, policy, decision } = this.plan;
    const seconds = (at: number | null): number | null => at && (at - this.#started) / 1000;
    const { prompt_tokens, completion_tokens } = this.usage;
    this.router.records.add({
      id,
      time: this.#head.created,
      request,
      device,
      cloud,
      threshold: policy.difficulty_threshold,
      decision,
      shadow: policy.shadow !== null,
      outcome: {
        path: [...this.#path],
        degraded: this.#degraded,
        finish,
        error: failure === null ? null : describe(failure),
        ttft: seconds(this.#first),
        total: seconds(performance.now()) ?? 0,
        prompt_tokens,
        completion_tokens,
        spent: this.#spent,
      },
      ...(policy.record_text && { text: { messages: this.request.messages, answer: this.#text } }),
    });
  }
}

/** The kind of an error, for records: its message may quote the prompt. */
function describe(error: unknown): string {
  if (error instanceof CloudError) return `CloudError ${error.status ?? ""}`.trim();
  return error instanceof DeviceError || error instanceof Error ? error.name : "unknown";
}
