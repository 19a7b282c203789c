/** What a hybrid client knows and remembers: both sides' state, speeds, costs, the threshold; and what follows from it. */

import { CloudError, DeviceError } from "../errors.js";
import { Breaker } from "./breaker.js";
import { Threshold, type ThresholdRecord } from "./calibration.js";
import { ALL_FEATURES, Cloud, type CloudOptions } from "./cloud.js";
import { blocksOf, costOf, decide } from "./decide.js";
import {
  countTokens,
  DEVICE_TIMEOUTS,
  type DeviceEngine,
  type DeviceTimeouts,
  deviceStream,
  freeTokens,
} from "./device.js";
import { type Hints, PlatformHints } from "./hints.js";
import { Ledger, type LedgerRecord } from "./ledger.js";
import { type Leg, type Piece, tokensOf } from "./leg.js";
import { estimateTokens, featuresOf, type HybridRequest, limitOf, type Message } from "./openai.js";
import { type Policy, type PolicyOptions, parsePolicy } from "./policy.js";
import { type DecisionRecord, Records } from "./records.js";
import { RetryBudget } from "./retry.js";
import { type SpeedRecord, Speeds } from "./speed.js";
import {
  type CloudState,
  type ConversationState,
  type Decision,
  type DeviceState,
  type Feature,
  NO_CONVERSATION,
  type Reason,
  type RouteRequest,
  type Side,
} from "./types.js";
import { childController } from "./wait.js";

/** What is kept from visit to visit. */
export interface KeptState {
  readonly ledger?: LedgerRecord;
  readonly threshold?: ThresholdRecord;
  readonly speeds?: { readonly device: SpeedRecord; readonly cloud: SpeedRecord };
}

export interface Store {
  read(): KeptState | null;
  write(state: KeptState): void;
}

export interface HybridOptions {
  /** The engine of the device; null until it is loaded, and it may be set later. */
  readonly device?: DeviceEngine | null;
  readonly cloud?: CloudOptions | null;
  readonly policy?: PolicyOptions;
  /** How difficult a conversation's next answer is, 0 to 1; null where that cannot be said. */
  readonly difficulty?: ((messages: readonly Message[]) => number | null) | null;
  /** What this build of the engine can do. */
  readonly device_features?: readonly Feature[];
  readonly device_timeouts?: Partial<DeviceTimeouts>;
  /** Instead of the browser's own. */
  readonly hints?: { read(): Hints };
  /** Keeps budgets, threshold and speeds; nothing is kept by default. */
  readonly store?: Store | null;
  readonly onRecord?: (record: DecisionRecord) => void;
  /** The device failed; the application may load it again and set `device`. */
  readonly onDeviceLost?: (error: Error) => void;
  /** Uniform in [0, 1), for the jitter of retries. */
  readonly random?: () => number;
}

/** A decision with what it was made from. */
export interface Plan {
  readonly id: string;
  readonly request: RouteRequest;
  readonly conversation: string | null;
  readonly policy: Policy;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  /** What is recorded. */
  readonly decision: Decision;
  /** What is done: the same, except in shadow mode. */
  readonly route: Decision;
}

/** A device that failed is left alone for this long before it is tried again; seconds. */
const DEVICE_REST = { failures: 1, seconds: 10, max_seconds: 300 };
const RECORDS_KEPT = 1000;
const CONVERSATIONS_KEPT = 1000;

export class Router {
  readonly records: Records;
  /** The device has answered once: its kernels are compiled, and what is measured from now on is its speed. */
  warm = false;
  readonly speeds: Record<Side, Speeds>;
  readonly retries: RetryBudget;
  readonly #ledger: Ledger;
  readonly #hints: { read(): Hints };
  readonly #conversations = new Map<string, Omit<ConversationState, "spent">>();
  #policy: Policy;
  #threshold: Threshold | null;
  #device: DeviceEngine | null;
  #deviceBreaker = new Breaker(DEVICE_REST);
  #deviceFailure = "";
  #free = 0;
  #cloud: Cloud | null = null;
  #breaker: Breaker;

  constructor(readonly options: HybridOptions) {
    const kept = options.store?.read() ?? {};
    this.#policy = parsePolicy(options.policy);
    this.#threshold = this.#makeThreshold(kept.threshold ?? {});
    this.#ledger = Ledger.restored(kept.ledger ?? {});
    this.speeds = {
      device: Speeds.restored(kept.speeds?.device ?? {}),
      cloud: Speeds.restored(kept.speeds?.cloud ?? {}),
    };
    this.#hints = options.hints ?? new PlatformHints();
    this.records = new Records(RECORDS_KEPT, options.onRecord ?? (() => undefined));
    this.retries = new RetryBudget(this.#policy.retry);
    this.#breaker = new Breaker(this.#policy.breaker);
    this.#device = options.device ?? null;
    this.cloud = options.cloud ?? null;
  }

  get device(): DeviceEngine | null {
    return this.#device;
  }

  set device(engine: DeviceEngine | null) {
    this.#device = engine;
    this.warm = false;
    this.#deviceBreaker = new Breaker(DEVICE_REST);
    this.#free = engine?.model.contextLength ?? 0;
  }

  set cloud(options: CloudOptions | null) {
    this.#cloud = options && new Cloud(options, this.#policy.timeouts);
    this.#breaker = new Breaker(this.#policy.breaker);
  }

  get policy(): Policy {
    return this.#policy;
  }

  set policy(options: PolicyOptions) {
    this.#policy = parsePolicy(options);
    this.#threshold = this.#makeThreshold(this.#threshold?.record() ?? {});
    this.cloud = this.#cloud?.options ?? null;
  }

  get continuesInCloud(): boolean {
    return this.#cloud?.continues ?? false;
  }

  /** Looks at both sides and decides. Asks nobody but the device. */
  async plan(request: HybridRequest): Promise<Plan> {
    const { x_nearfar: own = {} } = request;
    const [tokens, free] = this.#device
      ? await Promise.all([countTokens(this.#device, request.messages), freeTokens(this.#device)])
      : [null, 0];
    this.#free = free;
    const conversation = own.conversation ?? null;
    const routed: RouteRequest = {
      prompt_tokens: tokens ?? estimateTokens(request.messages),
      max_tokens: limitOf(request) ?? this.#policy.default_max_tokens,
      expected_tokens: own.expected_tokens ?? null,
      features: featuresOf(request),
      difficulty: own.difficulty ?? this.options.difficulty?.(request.messages) ?? null,
      mode: own.mode ?? null,
      private: own.private ?? false,
      conversation: this.#conversation(conversation),
    };
    const policy = this.#policyNow();
    const device = this.#deviceState();
    const cloud = this.#cloudState();
    const decision = decide(routed, device, cloud, policy);
    if ((routed.mode ?? policy.mode) === "auto" && routed.difficulty !== null && !routed.private)
      this.#threshold?.observe(routed.difficulty);
    const preferred = policy.shadow && (policy.shadow === "device" ? "prefer_device" : "prefer_cloud");
    const route = preferred ? decide({ ...routed, mode: preferred }, device, cloud, policy) : decision;
    this.retries.request();
    return { id: crypto.randomUUID(), request: routed, conversation, policy, device, cloud, decision, route };
  }

  /** Why each side cannot go on with a request now. */
  blocks({ request, conversation, policy }: Plan): Record<Side, readonly Reason[]> {
    // A request that is under way has reserved its cost itself: what is left must do for the rest.
    const now = { ...request, conversation: this.#conversation(conversation) };
    const { spent_day } = this.#policyNow();
    return blocksOf(now, this.#deviceState(), this.#cloudState(), { ...policy, spent_day });
  }

  /** Starts one side's part of an answer. */
  open(side: Side, request: HybridRequest, plan: Plan, parent: AbortSignal): Leg {
    const controller = childController(parent);
    const pieces =
      side === "device"
        ? this.#devicePieces(request, controller.signal)
        : this.#cloudPieces(request, plan, controller.signal);
    return { side, pieces, abort: () => controller.abort() };
  }

  /** What a whole answer costs in the cloud. */
  cost(promptTokens: number, answerTokens: number, { policy, cloud }: Plan): number {
    return costOf(promptTokens, answerTokens, cloud, policy);
  }

  /** An answer is complete: where the conversation is warm now. */
  answered(plan: Plan, legs: readonly Side[], tokens: number): void {
    const last = legs.at(-1);
    if (plan.conversation !== null && last) {
      const { cached_device, cached_cloud } = this.#conversation(plan.conversation);
      this.#conversations.delete(plan.conversation);
      this.#conversations.set(plan.conversation, {
        last_route: last,
        cached_device: last === "device" ? tokens : cached_device,
        cached_cloud: last === "cloud" ? tokens : cached_cloud,
      });
      const [oldest] = this.#conversations.keys();
      if (this.#conversations.size > CONVERSATIONS_KEPT && oldest !== undefined) this.#conversations.delete(oldest);
    }
    this.save();
  }

  save(): void {
    this.options.store?.write({
      ledger: this.#ledger.record(),
      ...(this.#threshold && { threshold: this.#threshold.record() }),
      speeds: { device: this.speeds.device.record(), cloud: this.speeds.cloud.record() },
    });
  }

  async *#devicePieces(request: HybridRequest, signal: AbortSignal): AsyncGenerator<Piece> {
    const engine = this.#device;
    const breaker = this.#deviceBreaker;
    const pass = breaker.begin(now());
    if (!engine || !pass) throw new DeviceError(this.#deviceFailure || "No model is loaded on this device.");
    try {
      yield* deviceStream(engine, request, { ...DEVICE_TIMEOUTS, ...this.options.device_timeouts }, signal);
      breaker.success(pass);
    } catch (error) {
      if (error instanceof DeviceError) {
        breaker.failure(now(), pass);
        this.#deviceFailure = error.message;
        this.options.onDeviceLost?.(error);
      }
      throw error;
    } finally {
      breaker.abandoned(pass);
    }
  }

  async *#cloudPieces(request: HybridRequest, plan: Plan, signal: AbortSignal): AsyncGenerator<Piece> {
    if (plan.request.private) throw new Error("a private request was about to leave the device: please report this");
    const cloud = this.#cloud;
    const breaker = this.#breaker;
    const pass = breaker.begin(now());
    if (!cloud || !pass) throw new CloudError("The cloud is not asked now: it failed lately, and is being tried.");
    const { prompt_tokens, max_tokens } = plan.request;
    const reserved = this.#ledger.reserve(plan.conversation, this.cost(prompt_tokens, max_tokens, plan));
    let counted = 0;
    let cost = 0;
    try {
      for await (const piece of cloud.stream(request, signal)) {
        for (const choice of piece.choices) counted += tokensOf(choice);
        const { usage } = piece;
        cost = this.cost(usage?.prompt_tokens ?? prompt_tokens, usage?.completion_tokens ?? counted, plan);
        yield piece;
      }
      breaker.success(pass);
    } catch (error) {
      if (error instanceof CloudError) this.#cloudFailed(error, breaker, pass);
      throw error;
    } finally {
      breaker.abandoned(pass);
      this.#ledger.settle(reserved, today(), cost);
      this.save();
    }
  }

  #cloudFailed(error: CloudError, breaker: Breaker, pass: "request" | "probe"): void {
    // A cloud that asks for a pause works; it only has too much to do.
    if (error.retryAfter !== null) breaker.hold(now(), error.retryAfter);
    else if (error.passing) breaker.failure(now(), pass);
  }

  #conversation(id: string | null): ConversationState {
    const known = id === null ? undefined : this.#conversations.get(id);
    return { ...NO_CONVERSATION, ...known, spent: this.#ledger.spentConversation(id) };
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
    return target_share === null ? null : Threshold.restored(kept, target_share, difficulty_threshold, calibration);
  }

  #deviceState(): DeviceState {
    const { battery, charging } = this.#hints.read();
    const rested = this.#deviceBreaker.allows(now());
    const { prefill_tps, decode_tps } = this.speeds.device;
    return {
      available: this.#device !== null && rested,
      why: this.#device === null ? "no model is loaded" : rested ? null : this.#deviceFailure,
      context: this.#device?.model.contextLength ?? 0,
      free_kv_tokens: this.#free,
      features: this.options.device_features ?? ["logprobs"],
      prefill_tps,
      decode_tps,
      queue_seconds: 0,
      battery,
      charging,
      // No browser tells.
      power_saver: null,
    };
  }

  #cloudState(): CloudState {
    const { online, metered } = this.#hints.read();
    const cloud = this.#cloud;
    const offline = cloud !== null && !online && !cloud.local;
    const { prefill_tps, decode_tps, round_trip } = this.speeds.cloud;
    return {
      available: cloud !== null && !offline,
      why: cloud === null ? "no address is set" : offline ? "offline" : null,
      breaker: this.#breaker.state(now()),
      retry_after: this.#breaker.retryAfter(now()),
      context: cloud?.options.context ?? null,
      features: cloud?.options.features ?? ALL_FEATURES,
      round_trip,
      queue_seconds: 0,
      prefill_tps,
      decode_tps,
      metered,
      price_in: cloud?.options.price_in ?? 0,
      price_out: cloud?.options.price_out ?? 0,
    };
  }
}

/** Seconds on a clock that only goes forward. */
function now(): number {
  return performance.now() / 1000;
}

/** The day at the person's place, for budgets. */
function today(): string {
  const date = new Date();
  const two = (number: number): string => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}
