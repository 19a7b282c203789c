/**
 * State that all requests of a client share: both sides, their breakers and speeds, budgets, the threshold,
 * conversations.
 */

import { CloudError, DeviceError, later, RequestError } from "../protocol/errors.js";
import { Breaker } from "./breaker.js";
import { Threshold, type ThresholdRecord } from "./calibration.js";
import { ALL_FEATURES, Cloud, type CloudOptions } from "./cloud.js";
import { blocksOf, costOf, decide } from "./decide.js";
import { countTokens, type DeviceEngine, deviceStream, freeTokens } from "./device.js";
import type { FittedRouter } from "./fitted.js";
import { type Hints, PlatformHints } from "./hints.js";
import { Ledger } from "./ledger.js";
import type { Leg } from "./leg.js";
import type { Doubt } from "./monitor.js";
import { type HybridRequest, limitOf, type Message, type Usage } from "./openai.js";
import type { HybridOptions } from "./options.js";
import type { RoutePlan, Settled, Ticket, Told } from "./plan.js";
import { type Policy, type PolicyOptions, parsePolicy } from "./policy.js";
import { type Marks, PrivateTexts } from "./privacy.js";
import { noRoute } from "./reasons.js";
import { type Ending, Records, recordOf } from "./records.js";
import { type Asked, estimateTokens, featuresOf } from "./request.js";
import { RetryBudget } from "./retry.js";
import { RECORD } from "./router-model.js";
import type { Scorer } from "./scorer.js";
import { Speeds } from "./speed.js";
import type { CloudState, ConversationState, DeviceState, PrivateBy, RouteRequest, Side } from "./types.js";
import { childController } from "./wait.js";

const RECORDS_KEPT = 1000;
const CONVERSATIONS_KEPT = 1000;
const CACHE_SECONDS = 300;

/** The reason for not calling the cloud. */
const BECAME_PRIVATE = "private";
/** Reasons of a CloudError that do not count against the cloud. */
const KEPT_UP: ReadonlySet<string> = new Set(["429", BECAME_PRIVATE]);

/** A conversation's last side, and how many of its tokens each side has seen. */
interface Memory {
  readonly last_route: Side;
  readonly tokens: Record<Side, number>;
  readonly cloudTime: number;
}

/** What is known of a request before its decision. */
interface Seen extends Pick<RoutePlan, "marks" | "private_by" | "told"> {
  readonly difficulty: number | null;
  readonly prompt_tokens: number;
}

export class Router {
  readonly records: Records;
  readonly speeds: Record<Side, Speeds>;
  retries: RetryBudget;
  /** Whether the device has answered once: its kernels are compiled, and later measurements are its speed. */
  warm = false;
  scorer: Scorer | null;
  readonly #ledger: Ledger;
  readonly #hints: { read(): Hints };
  readonly #private: PrivateTexts;
  readonly #memory = new Map<string, Memory>();
  #policy: Policy;
  #threshold: Threshold | null;
  #device: DeviceEngine | null = null;
  #fitted: FittedRouter | null = null;
  #free = 0;
  #cloud: Cloud | null = null;
  #breakers: Record<Side, Breaker>;

  constructor(readonly options: HybridOptions) {
    if (typeof options !== "object" || options === null)
      throw new RequestError("HybridClient takes an object with device, cloud or both");
    const kept = options.store?.read() ?? {};
    this.#policy = parsePolicy(options.policy);
    this.scorer = options.difficulty ?? null;
    if (this.#policy.router !== null && this.scorer !== null)
      throw new RequestError("give one of policy.router and difficulty", "router");
    this.#threshold = this.#makeThreshold(kept.threshold ?? {});
    this.#ledger = Ledger.restored(kept.ledger ?? {});
    this.#private = new PrivateTexts(kept.private ?? []);
    this.speeds = {
      device: Speeds.restored(kept.speeds?.device ?? {}),
      cloud: Speeds.restored(kept.speeds?.cloud ?? {}),
    };
    this.#hints = options.hints ?? new PlatformHints();
    this.records = new Records(RECORDS_KEPT, options.onRecord ?? (() => undefined));
    this.retries = new RetryBudget(this.#policy.retry);
    this.#breakers = {
      device: new Breaker(this.#policy.device_breaker),
      cloud: new Breaker(this.#policy.breaker),
    };
    this.device = options.device ?? null;
    this.cloud = options.cloud ?? null;
  }

  get device(): DeviceEngine | null {
    return this.#device;
  }

  set device(engine: DeviceEngine | null) {
    if (engine !== null && typeof engine?.model !== "object")
      throw new RequestError("device must be an engine: give what createEngine(url) resolves to", "device");
    this.#device = engine;
    this.warm = false;
    this.#free = engine?.model.contextLength ?? 0;
    this.#breakers.device = new Breaker(this.#policy.device_breaker);
  }

  set cloud(options: CloudOptions | null) {
    this.#cloud = options && new Cloud(options, this.#policy.timeouts);
    this.#breakers.cloud = new Breaker(this.#policy.breaker);
  }

  get policy(): Policy {
    return this.#policy;
  }

  set policy(options: PolicyOptions) {
    const policy = parsePolicy(options);
    const renewed = (name: "retry" | "breaker" | "device_breaker"): boolean =>
      JSON.stringify(policy[name]) !== JSON.stringify(this.#policy[name]);
    if (renewed("retry")) this.retries = new RetryBudget(policy.retry);
    if (renewed("device_breaker")) this.#breakers.device = new Breaker(policy.device_breaker);
    if (renewed("breaker")) this.#breakers.cloud = new Breaker(policy.breaker);
    if (policy.router !== this.#policy.router) this.#fitted = null;
    this.#policy = policy;
    if (this.#fitted !== null) this.#use(this.#fitted);
    this.#threshold = this.#makeThreshold(this.#threshold?.record() ?? {});
    const { options: cloud = null } = this.#cloud ?? {};
    this.#cloud = cloud && new Cloud(cloud, policy.timeouts);
  }

  /**
   * Decides for a request and admits it. Queries only the device. Throws RouteError where no side may answer.
   */
  async plan(asked: Asked): Promise<RoutePlan> {
    const { request, hints } = asked;
    const { signal: _, ...said } = request;
    const marks = this.#private.marks(said);
    const before = this.#privateBy(marks, hints);
    const engine = this.#device;
    const [tokens, free] = engine
      ? await Promise.all([countTokens(engine, request), freeTokens(engine)])
      : [null, 0];
    this.#free = free;
    const scored = (hints.mode ?? this.#policy.mode) === "auto" && before === null;
    const told = scored && engine ? await this.#told(engine, request) : null;
    try {
      const difficulty = scored ? this.#difficulty(request.messages, told) : null;
      const prompt_tokens = tokens ?? estimateTokens(request.messages);
      // While the device was queried, another request may have made this one private.
      const private_by = before ?? this.#privateBy(marks, hints);
      return this.#decided(asked, { difficulty, prompt_tokens, marks, private_by, told });
    } catch (error) {
      told?.release();
      throw error;
    }
  }

  /** Decides without an await up to the ticket, so that the decision still holds then. */
  #decided({ request, hints }: Asked, seen: Seen): RoutePlan {
    const { difficulty, prompt_tokens, marks, private_by, told } = seen;
    const { mode, conversation, expected_tokens } = hints;
    const { messages } = request;
    const routed: RouteRequest = {
      prompt_tokens,
      max_tokens: limitOf(request) ?? this.#policy.default_max_tokens,
      expected_tokens,
      features: featuresOf(request),
      difficulty,
      mode,
      private: private_by !== null,
      quotes_private: private_by === "quote",
      conversation: this.#conversation(conversation, prompt_tokens),
    };
    const policy = this.#policyNow();
    const [device, cloud] = [this.#deviceState(routed), this.#cloudState()];
    const real = decide(routed, device, cloud, policy);
    if (difficulty !== null && private_by === null) this.#threshold?.observe(difficulty);
    const { shadow } = policy;
    const decision = shadow ? decide(preferring(shadow, routed, policy), device, cloud, policy) : real;
    const made = {
      id: crypto.randomUUID(),
      messages,
      request: routed,
      private_by,
      marks,
      conversation,
      policy,
      device,
      cloud,
      decision,
      told,
    };
    if (decision.route === null) throw noRoute(decision.reasons);
    this.retries.request();
    return { ...made, would: shadow && real, ticket: this.#ticket(made, decision.route) };
  }

  /** The plan with its present privacy, which may have changed since it was decided. */
  now(plan: RoutePlan): RoutePlan {
    const private_by = plan.private_by ?? this.#privateBy(plan.marks, plan);
    if (private_by === plan.private_by) return plan;
    const request = { ...plan.request, private: true, quotes_private: private_by === "quote" };
    return { ...plan, request, private_by };
  }

  /** Lets a side take over if it may now; everything is checked again. */
  admit(given: RoutePlan, side: Side, begun: boolean): Ticket | null {
    if (side === "cloud" && begun && !(this.#cloud?.options.continues ?? true)) return null;
    const plan = this.now(given);
    const spent = this.#ledger.spentConversation(plan.conversation);
    const request = { ...plan.request, conversation: { ...plan.request.conversation, spent } };
    const blocks = blocksOf(request, this.#deviceState(request), this.#cloudState(), this.#policyNow());
    return blocks[side].length > 0 ? null : this.#ticket(plan, side);
  }

  /** Opens a side's part of an answer. */
  open({ side }: Ticket, request: HybridRequest, plan: RoutePlan, parent: AbortSignal): Leg {
    const controller = childController(parent);
    return {
      side,
      pieces: this.#pieces(side, request, plan, controller.signal),
      abort: () => controller.abort(),
    };
  }

  /**
   * Accounts for a call that ended, well or with an error; null: it was left. Returns its cost, computed from
   * `used`.
   */
  leave(ticket: Ticket, plan: RoutePlan, outcome: Settled, used: Usage | null): number {
    if (ticket.ended) return 0;
    ticket.ended = true;
    const { breaker, pass, reservation } = ticket;
    if (outcome === "ok") breaker.success(pass);
    else if (outcome instanceof CloudError && KEPT_UP.has(outcome.reason)) breaker.abandoned(pass);
    else if (outcome instanceof CloudError || outcome instanceof DeviceError) breaker.failure(now(), pass);
    else breaker.abandoned(pass);
    if (outcome instanceof CloudError && (outcome.retryAfter !== null || outcome.reason === "429"))
      breaker.hold(now(), outcome.retryAfter ?? 1);
    if (outcome instanceof DeviceError) this.options.onDeviceLost?.(outcome);
    if (reservation === null) return 0;
    const cost = used ? this.price(plan, used) : 0;
    this.#ledger.settle(reservation, today(), cost);
    return cost;
  }

  /** Writes the decision record of an answer that ended. */
  record(plan: RoutePlan, created: number, ending: Ending): void {
    this.records.add(recordOf(this.now(plan), created, ending));
  }

  /** The cloud's price of these tokens. */
  price(
    { policy, cloud }: Pick<RoutePlan, "policy" | "cloud">,
    { prompt_tokens, completion_tokens }: Usage,
  ): number {
    return costOf(prompt_tokens, completion_tokens, cloud, policy);
  }

  /** Records an answer: the conversation's last side, and the state to store. */
  remember(plan: RoutePlan, route: Side, tokens: number, answer: string): void {
    const { conversation, private_by } = this.now(plan);
    if (private_by !== null && answer !== "") {
      const said = { messages: [{ role: "assistant", content: answer }] };
      this.#private.remember(this.#private.marks(said), null);
    }
    if (conversation !== null) {
      const before = this.#memory.get(conversation);
      const cloudTime = route === "cloud" ? now() : (before?.cloudTime ?? 0);
      // Deleted first, so that it becomes the most recently used one.
      this.#memory.delete(conversation);
      const seen = { device: 0, cloud: 0, ...before?.tokens, [route]: tokens };
      this.#memory.set(conversation, { last_route: route, tokens: seen, cloudTime });
      const [oldest] = this.#memory.keys();
      if (this.#memory.size > CONVERSATIONS_KEPT && oldest !== undefined) this.#memory.delete(oldest);
    }
    this.#keep();
  }

  #keep(): void {
    this.options.store?.write({
      ledger: this.#ledger.record(),
      private: this.#private.record(),
      ...(this.#threshold && { threshold: this.#threshold.record() }),
      speeds: { device: this.speeds.device.record(), cloud: this.speeds.cloud.record() },
    });
  }

  /**
   * The reason why a request is private now. Remembers and stores its texts as private, or its conversation
   * if it only quotes a private text.
   */
  #privateBy(marks: Marks, hints: { readonly conversation: string | null; readonly private?: boolean }) {
    const found: PrivateBy | null = hints.private
      ? "request"
      : this.#private.known(marks, hints.conversation);
    const added =
      found === "quote"
        ? this.#private.rememberConversation(hints.conversation)
        : found !== null && this.#private.remember(marks, hints.conversation);
    if (added) this.#keep();
    return found;
  }

  #pieces(side: Side, request: HybridRequest, plan: RoutePlan, signal: AbortSignal): Leg["pieces"] {
    if (side === "device") {
      const { device_first_token, device_between } = this.#policy.timeouts;
      const timeouts = { first_token: device_first_token, between: device_between };
      return deviceStream(this.#device, request, timeouts, signal);
    }
    // The decision ensures this; the check protects against a mistake in it.
    if (plan.request.private || !this.#cloud)
      throw new Error("the cloud was asked against the policy: please report this");
    if (this.now(plan).request.private) return becamePrivate();
    return this.#cloud.stream(request, signal);
  }

  /** Makes the ticket of a call. Called without an await after the decision. */
  #ticket(plan: Pick<RoutePlan, "request" | "conversation" | "policy" | "cloud">, side: Side): Ticket {
    const breaker = this.#breakers[side];
    const { prompt_tokens, max_tokens } = plan.request;
    const most = { prompt_tokens, completion_tokens: max_tokens, total_tokens: prompt_tokens + max_tokens };
    const reservation =
      side === "cloud" ? this.#ledger.reserve(plan.conversation, this.price(plan, most)) : null;
    // A device that is resting is called nevertheless where only it may answer.
    return { side, pass: breaker.begin(now()) ?? "request", breaker, reservation, ended: false };
  }

  /** What the device's model shows about a prompt, for a router or for records. */
  async #told(engine: DeviceEngine, request: HybridRequest): Promise<Told | null> {
    const { router } = this.#policy;
    if (router === null) return null;
    const { knowledgeOf, loadRouter, wantedForRecords } = await later(
      () => import("./fitted.js"),
      "The code of routers",
    );
    if (router !== RECORD && this.#fitted === null) {
      const fitted = await loadRouter(router);
      if (this.#policy.router === router) this.#use(fitted);
    }
    const fitted = this.#fitted;
    const { name, checkpoint, quantization, vocabSize } = engine.model;
    const artifact = `${checkpoint ?? ""}/${quantization ?? ""}`;
    fitted?.check(artifact, name);
    const limit = this.#policy.timeouts.device_first_token;
    const wanted = fitted?.wanted ?? wantedForRecords(vocabSize ?? 0);
    const held = await knowledgeOf(engine, request, wanted, limit);
    if (held === null) return null;
    const { knowledge } = held;
    const doubts = fitted !== null && fitted.model.limit !== null;
    const doubt: Doubt = (first, ended) => fitted?.doubt(knowledge, first, ended) ?? null;
    const judge = doubts ? { tokens: fitted.model.tokens, doubt } : null;
    return { ...held, model: name, artifact, gain: fitted?.gain(knowledge) ?? null, judge };
  }

  /** Decides by a router from now on, which brings its threshold. */
  #use(fitted: FittedRouter): void {
    this.#fitted = fitted;
    this.#policy = { ...this.#policy, difficulty_threshold: fitted.model.threshold };
    if (this.#threshold?.seen === 0) this.#threshold = this.#makeThreshold({});
  }

  #difficulty(messages: readonly Message[], told: Told | null): number | null {
    if (this.#fitted !== null) return told?.gain ?? null;
    const score = this.scorer?.(messages) ?? null;
    return score === null ? null : Math.min(Math.max(score, 0), 1);
  }

  #conversation(id: string | null, prompt: number): ConversationState {
    const memory = id === null ? undefined : this.#memory.get(id);
    const warm = memory && now() - memory.cloudTime < (this.#cloud?.options.cache_seconds ?? CACHE_SECONDS);
    return {
      last_route: memory?.last_route ?? null,
      cached_device: Math.min(memory?.tokens.device ?? 0, prompt),
      cached_cloud: warm ? Math.min(memory.tokens.cloud, prompt) : 0,
      spent: this.#ledger.spentConversation(id),
    };
  }

  #policyNow(): Policy {
    const difficulty_threshold = this.#threshold?.value ?? this.#policy.difficulty_threshold;
    return {
      ...this.#policy,
      difficulty_threshold,
      spent_day: this.#policy.spent_day + this.#ledger.spentDay(today()),
    };
  }

  #makeThreshold(kept: Partial<ThresholdRecord>): Threshold | null {
    const { target_share, difficulty_threshold, calibration } = this.#policy;
    return target_share === null
      ? null
      : Threshold.restored(kept, target_share, difficulty_threshold, calibration);
  }

  #deviceState(request: RouteRequest): DeviceState {
    const { battery, charging } = this.#hints.read();
    const only = request.private || (request.mode ?? this.#policy.mode) === "device_only";
    const rests = !only && !this.#breakers.device.allows(now());
    const { prefill_tps, decode_tps } = this.speeds.device;
    return {
      available: this.#device !== null && !rests,
      why: this.#device === null ? "no model is loaded" : rests ? "failed lately" : null,
      context: this.#device?.model.contextLength ?? 0,
      free_kv_tokens: this.#free,
      features: this.options.device_features ?? this.#device?.model.features ?? ["logprobs"],
      prefill_tps,
      decode_tps,
      queue_seconds: 0,
      battery,
      charging,
      // No browser reports it.
      power_saver: null,
      here: true,
    };
  }

  #cloudState(): CloudState {
    const { online, metered } = this.#hints.read();
    const { options = null, local = false } = this.#cloud ?? {};
    const offline = options !== null && !online && !local;
    const breaker = this.#breakers.cloud;
    const state = breaker.state(now());
    const { prefill_tps, decode_tps, round_trip } = this.speeds.cloud;
    return {
      available: options !== null && !offline,
      why: options === null ? "no address is set" : offline ? "offline" : null,
      // Half open with its probe under way means closed to others.
      breaker: state === "half_open" && !breaker.allows(now()) ? "open" : state,
      retry_after: breaker.retryAfter(now()),
      context: options?.context ?? null,
      features: options?.features ?? ALL_FEATURES,
      round_trip,
      queue_seconds: 0,
      prefill_tps,
      decode_tps,
      metered,
      price_in: options?.price_in ?? 0,
      price_out: options?.price_out ?? 0,
    };
  }
}

/** What the cloud gives for a request that became private before it was sent. */
// biome-ignore lint/correctness/useYield: it gives nothing
async function* becamePrivate(): Leg["pieces"] {
  throw new CloudError("The request has become private.", BECAME_PRIVATE);
}

/** The request as if that side were preferred, as far as its mode leaves a choice. */
function preferring(side: Side, request: RouteRequest, policy: Policy): RouteRequest {
  const mode = request.mode ?? policy.mode;
  if (mode === "device_only" || mode === "cloud_only") return request;
  return { ...request, mode: side === "device" ? "prefer_device" : "prefer_cloud" };
}

/** Seconds on a monotonic clock. */
function now(): number {
  return performance.now() / 1000;
}

/** The day of the budgets (UTC). */
function today(): string {
  return new Date().toISOString().slice(0, 10);
}
