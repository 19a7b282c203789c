/** One answer: drives the hand-over table with the events of the sides, and shows the pieces. */

import {
  abortReason,
  CloudError,
  DeviceError,
  NearfarError,
  RequestError,
  throwIfAborted,
} from "../protocol/errors.js";
import { type Attempt, attempt, type Happened, heard, learn, usedBy } from "./attempt.js";
import { failureOf, isRequestError } from "./device.js";
import {
  type Action,
  advance,
  begin,
  type HandoverEvent,
  type Rules,
  rulesOf,
  running,
  type State,
} from "./handover.js";
import { type ChunkContents, isUseful, tokensOf } from "./leg.js";
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
import type { RoutePlan, Settled, Ticket } from "./plan.js";
import { withoutQuotes } from "./privacy.js";
import { isPlain } from "./request.js";
import { backoff } from "./retry.js";
import type { Router } from "./router.js";
import type { Side } from "./types.js";
import { pause } from "./wait.js";
import { Watch } from "./watch.js";

export class HybridAnswer {
  readonly #request: HybridRequest;
  readonly #controller = new AbortController();
  readonly #head: Pick<Chunk, "id" | "object" | "created" | "model">;
  readonly #started = performance.now();
  readonly #rules: Rules;
  #state: State;
  readonly #attempts = new Map<Side, Attempt>();
  #ticket: Ticket;
  #held: ChunkContents[] = [];
  #error: Error | null = null;
  /** Text and tokens that the caller has. */
  #text = "";
  #count = 0;
  /** Attempts that gave something, and the usage that the last one reports. */
  #parts = 0;
  #usage: Usage | null = null;
  #spent = 0;
  #watch: Watch | null = null;
  /** The watch that saw the first tokens. */
  #beginning: Watch | null = null;
  #first: number | null = null;
  #ended = false;

  constructor(
    private readonly router: Router,
    request: HybridRequest,
    private readonly plan: RoutePlan,
  ) {
    const { max_completion_tokens: _, ...rest } = request;
    const { decision, policy, ticket } = plan;
    const { max_tokens } = plan.request;
    // The limit on which the decision was based.
    this.#request = { ...rest, max_tokens };
    this.#ticket = ticket;
    const streamed = request.stream ?? false;
    const answer = { max_tokens, plain: isPlain(request), private: plan.request.private, streamed };
    const hold_tokens = Math.max(policy.hold_tokens, plan.told?.judge?.tokens ?? 0);
    this.#rules = rulesOf({ ...policy, hold_tokens }, decision, answer);
    this.#state = begin(this.#rules, ticket.side, decision.reasons, decision.degraded);
    const created = Math.floor(Date.now() / 1000);
    this.#head = { id: `chatcmpl-${plan.id}`, object: "chat.completion.chunk", created, model: "" };
    const { signal } = request;
    const abort = (): void => this.abort(signal);
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort, { once: true, signal: this.#controller.signal });
  }

  /** Ends the answer, whether somebody reads it or not: what it holds is released at once. */
  abort(signal?: AbortSignal): void {
    this.#end(null, abortReason(signal));
  }

  /** The sides and reasons of the answer, as far as they are known; complete with its last chunk. */
  get info(): RouteInfo {
    const { decision, would, id } = this.plan;
    const { path, reasons, degraded } = this.#state;
    return {
      decision_id: id,
      route: path.at(-1) ?? decision.route ?? "device",
      path,
      reasons,
      degraded,
      predicted: decision.predicted,
      spent: this.#spent,
      saved: path.length > 0 ? Math.max(this.router.price(this.plan, this.usage) - this.#spent, 0) : 0,
      would_route: would?.route ?? null,
    };
  }

  /** Tokens of the whole answer, from all its parts. */
  get usage(): Usage {
    if (this.#usage && this.#parts === 1) return this.#usage;
    const { prompt_tokens } = this.plan.request;
    return { prompt_tokens, completion_tokens: this.#count, total_tokens: prompt_tokens + this.#count };
  }

  /** The chunks. The last one ends the answer; a chunk with the usage follows where the request wants it. */
  async *chunks(): AsyncGenerator<Chunk> {
    let failure: unknown = null;
    try {
      throwIfAborted(this.#signal);
      let happened: Happened = { event: { on: "start" }, piece: null };
      while (this.#state.phase !== "over") {
        const events = [happened.event];
        for (let event = events.shift(); event; event = events.shift()) {
          const [state, actions] = advance(this.#rules, this.#state, event);
          this.#state = state;
          for (const action of actions) {
            for (const shown of this.#showing(action, happened.piece)) yield* this.#emit(shown);
            const answer = await this.#done(action, happened.piece);
            if (answer) events.push({ on: answer });
          }
        }
        if (this.#over) break;
        happened = await this.#next();
      }
      const { finish, path } = this.#state;
      const end = { index: 0, delta: {}, finish_reason: (finish ?? "stop") as FinishReason, logprobs: null };
      this.router.remember(this.plan, path.at(-1) ?? "device", this.usage.total_tokens, this.#text);
      yield { ...this.#head, choices: [end], x_nearfar: this.info };
      if (this.#request.stream_options?.include_usage)
        yield { ...this.#head, choices: [], usage: this.usage, x_nearfar: this.info };
    } catch (error) {
      failure = error;
      throw error;
    } finally {
      this.#end(failure);
    }
  }

  get #signal(): AbortSignal {
    return this.#controller.signal;
  }

  get #over(): boolean {
    return this.#state.phase === "over";
  }

  // Performing the table's actions.

  #showing(action: Action, piece: ChunkContents | null): readonly ChunkContents[] {
    if (action.do !== "show" && action.do !== "show_held") return [];
    const held = this.#held;
    this.#held = [];
    return action.do === "show" && piece ? [...held, piece] : held;
  }

  /** Runs every action except showing. Asking the router returns an event. */
  async #done(action: Action, piece: ChunkContents | null): Promise<"admitted" | "barred" | null> {
    throwIfAborted(this.#signal);
    if (action.do === "hold" && piece) this.#held.push(piece);
    else if (action.do === "drop") this.#held = [];
    else if (action.do === "open") this.#open(this.#ticket);
    else if (action.do === "settle") {
      const attempt = this.#attempts.get(action.side);
      if (attempt) this.#settle(attempt, action.as === "failed" ? (this.#error ?? "left") : action.as);
    } else if (action.do === "retry" && !(await this.#waited())) return "barred";
    else if (action.do === "admit" || action.do === "retry")
      return this.#admit(action.side) ? "admitted" : "barred";
    else if (action.do === "fail") throw this.#givenUp();
    return null;
  }

  #open(ticket: Ticket): void {
    const { side } = ticket;
    const request = continued(this.#request, this.#text, this.#count);
    const { told, policy } = this.plan;
    const first = told !== null && this.#count === 0;
    const watched = side === "device" && (first || this.#rules.watched) && !this.#state.escalated;
    const doubt = (first && told.judge?.doubt) || null;
    const watch = watched ? new Watch(policy.monitor, this.#state.logprobs, first, doubt) : null;
    this.#watch = watch ?? this.#watch;
    if (first) this.#beginning = watch ?? this.#beginning;
    const leg = this.router.open(ticket, watch?.request(request) ?? request, this.plan, this.#signal);
    this.#attempts.set(side, attempt(leg, ticket, watch, this.#count));
  }

  /**
   * Accounts for a part once, and learns from it. It is charged if it gave something, or may have begun to.
   */
  #settle(attempt: Attempt, outcome: Settled): void {
    const { ticket, count, usage } = attempt;
    this.#attempts.delete(ticket.side);
    attempt.abort();
    attempt.pieces.return(undefined).catch(() => undefined);
    const used = usedBy(attempt, this.plan.request.prompt_tokens);
    // Where the caller left, the prompt may have been computed.
    const charged = usage || count > 0 || outcome === "left";
    this.#spent += this.router.leave(ticket, this.plan, outcome, charged ? used : null);
    if (outcome === "ok") learn(this.router, attempt, used.prompt_tokens);
  }

  /** Waits for a retry. Returns false where the policy or the budget has none left. */
  async #waited(): Promise<boolean> {
    const random = (this.router.options.random ?? Math.random)();
    const retryAfter = this.#error instanceof CloudError ? this.#error.retryAfter : null;
    const wait = backoff(this.#state.cloud_failures - 1, random, retryAfter, this.plan.policy.retry);
    if (wait === null || !this.router.retries.withdraw()) return false;
    // A timer may fire a millisecond early, when the breaker still holds.
    await pause(wait + 0.002, this.#signal);
    return true;
  }

  #admit(side: Side): boolean {
    throwIfAborted(this.#signal);
    const ticket = this.router.admit(this.plan, side, this.#text !== "");
    if (ticket) this.#ticket = ticket;
    return ticket !== null;
  }

  /** The last error; without its message where that quotes the prompt. */
  #givenUp(): Error {
    const error = this.#error ?? new DeviceError("The answer ended before it was complete.");
    const said = withoutQuotes(error.message, this.plan.messages);
    if (said === error.message) return error;
    if (error instanceof CloudError)
      return new CloudError(said, error.reason, { retryAfter: error.retryAfter });
    if (isRequestError(error))
      return new RequestError(said, (error as { param?: string | null }).param ?? null, {
        code: (error as RequestError).code,
      });
    return new DeviceError(said, { code: error instanceof NearfarError ? error.code : "device-failed" });
  }

  // Reading the events.

  /**
   * Waits for the next event of the answering side, or of the faster of two, or "silent" after too long
   * without one.
   */
  async #next(): Promise<Happened> {
    throwIfAborted(this.#signal);
    const { phase, side, raced, seen } = this.#state;
    const attempts = running(this.#state).flatMap((name) => this.#attempts.get(name) ?? []);
    const [only] = attempts;
    const { hedge, hedge_seconds } = this.#rules;
    const hedging = phase === "answering" && hedge !== null && hedge !== side && !raced && seen === 0;
    if (attempts.length === 1 && only && !only.task && !hedging) return await this.#of(only);
    const racing: Promise<Attempt | null>[] = attempts.map(async (attempt) => {
      attempt.task ??= this.#of(attempt);
      await attempt.task;
      return attempt;
    });
    for (const runner of racing) runner.catch(() => undefined);
    const waiting = new AbortController();
    if (hedging) racing.push(pause(hedge_seconds ?? 0, waiting.signal).then(() => null));
    for (const runner of racing) runner.catch(() => undefined);
    try {
      const first = await Promise.race(racing);
      if (!first?.task) return { event: { on: "silent" }, piece: null };
      const happened = await first.task;
      first.task = null;
      return happened;
    } finally {
      waiting.abort();
    }
  }

  /** The next event of a side: a piece with a part of the answer, or its end. */
  async #of(attempt: Attempt): Promise<Happened> {
    const { side } = attempt;
    try {
      for (;;) {
        const { done, value: piece } = await attempt.pieces.next();
        throwIfAborted(this.#signal);
        if (done) return { event: { on: "ended", side }, piece: null };
        const tokens = this.#measure(attempt, piece);
        const [choice] = piece.choices;
        if (!choice || !isUseful(choice)) continue;
        this.plan.told?.release();
        const low = attempt.watch && !this.#state.escalated ? attempt.watch.push(piece) : null;
        const plain = !choice.delta.tool_calls && !choice.delta.reasoning_content;
        return {
          event: { on: "piece", side, tokens, plain, finish: choice.finish_reason ?? null, low },
          piece,
        };
      }
    } catch (error) {
      throwIfAborted(this.#signal);
      return { event: this.#fault(side, error, attempt.watch !== null), piece: null };
    }
  }

  #fault(side: Side, error: unknown, watched: boolean): HandoverEvent {
    if (isRequestError(error)) {
      this.#error = error as Error;
      const param = String((error as { param?: unknown }).param);
      const known = Object.hasOwn(this.#request, param);
      // The artifact has no logprobs, which only the monitor wanted, not the caller.
      const unwatched = watched && param === "logprobs" && !this.#request.logprobs;
      return { on: "refused", side, code: known ? param : null, unwatched };
    }
    if (!(error instanceof CloudError || error instanceof DeviceError)) throw error;
    this.#error = error;
    return { on: "failed", side, code: error instanceof CloudError ? error.reason : failureOf(error) };
  }

  #measure(attempt: Attempt, piece: ChunkContents): number {
    this.#usage = piece.usage ?? this.#usage;
    const isFirst = attempt.count === 0;
    const tokens = heard(attempt, piece);
    if (isFirst && tokens > 0) this.#parts += 1;
    return tokens;
  }

  // Showing and recording.

  *#emit({ choices, model }: ChunkContents): Generator<Chunk> {
    const [choice] = choices;
    if (!choice) return;
    const logprobs = this.#asked(choice.logprobs ?? null);
    const { role: _, ...delta } = choice.delta;
    if (this.#first === null) {
      this.#first = performance.now();
      this.#head.model = model;
      yield this.#chunk({ delta: { role: "assistant", content: "" } }, this.info);
    }
    this.#text += delta.content ?? "";
    this.#count += tokensOf(choice);
    if (isUseful({ ...choice, logprobs, finish_reason: null })) yield this.#chunk({ delta, logprobs });
  }

  /** The logprobs that the caller requested; the monitor may have had more. */
  #asked(logprobs: Logprobs | null): Logprobs | null {
    if (!this.#request.logprobs || !logprobs) return null;
    const most = this.#request.top_logprobs ?? 0;
    const content = logprobs.content.map((token) => ({
      ...token,
      top_logprobs: token.top_logprobs.slice(0, most),
    }));
    return { content };
  }

  #chunk(choice: Pick<ChunkChoice, "delta"> & Partial<ChunkChoice>, info?: RouteInfo): Chunk {
    const choices = [{ index: 0, finish_reason: null, logprobs: null, ...choice }];
    return { ...this.#head, choices, ...(info && { x_nearfar: info }) };
  }

  /**
   * Ends both sides once, releases what is held, writes the decision record. `left`: the reason, where the
   * caller gave up.
   */
  #end(failure: unknown, left?: unknown): void {
    if (this.#ended) return;
    this.#ended = true;
    this.plan.told?.release();
    for (const attempt of [...this.#attempts.values()]) this.#settle(attempt, "left");
    this.router.leave(this.plan.ticket, this.plan, "left", null);
    this.router.leave(this.#ticket, this.plan, "left", null);
    this.#controller.abort(left ?? failure ?? undefined);
    this.router.record(this.plan, this.#head.created, {
      info: this.info,
      usage: this.usage,
      ttft: this.#first && (this.#first - this.#started) / 1000,
      seconds: (performance.now() - this.#started) / 1000,
      finish: this.#state.finish,
      monitor: this.#watch?.monitor ?? null,
      beginning: this.#beginning?.monitor ?? null,
      text: this.#text,
      failure,
    });
  }
}
