/**
 * Chooses device or cloud: a pure function of request, device, cloud and policy. The Python version is the
 * same; both pass the shared vectors.
 *
 * Order of the rules: impossible → budgets → difficulty → speed → power → warm cache → the device.
 */

import type { Policy } from "./policy.js";
import {
  type CloudState,
  type DeviceState,
  type Mode,
  type Prediction,
  type Reason,
  type RouteDecision,
  type RouteRequest,
  reason,
  type Side,
} from "./types.js";

/**
 * Decides where a request goes, and why. Equal arguments give an equal decision: there is no clock and no
 * randomness.
 */
export function decide(
  request: RouteRequest,
  device: DeviceState,
  cloud: CloudState,
  policy: Policy,
): RouteDecision {
  const mode = modeOf(request, policy);
  const predicted = { device: predictDevice(request, device), cloud: predictCloud(request, cloud) };
  const cost = costOf(request.prompt_tokens, request.max_tokens, cloud, policy);
  const blocks = blocksOf(request, device, cloud, policy);
  const wanted = wantedSide({ request, device, cloud, policy, mode, predicted });
  const free = (["device", "cloud"] as const).filter((side) => blocks[side].length === 0);
  const route = free.includes(wanted.side) ? wanted.side : (free[0] ?? null);
  const degraded = route === "device" && wanted.side === "cloud";
  const reasons = route === wanted.side || degraded ? wanted.reasons : [];
  return {
    route,
    fallback: free.find((side) => side !== route) ?? null,
    degraded,
    reasons: [...reasons, ...blocks.device, ...blocks.cloud],
    predicted,
    cost,
  };
}

/** The reasons why each side cannot or must not answer; empty where it can. */
export function blocksOf(
  request: RouteRequest,
  device: DeviceState,
  cloud: CloudState,
  policy: Policy,
): Record<Side, readonly Reason[]> {
  const mode = modeOf(request, policy);
  const cost = costOf(request.prompt_tokens, request.max_tokens, cloud, policy);
  return {
    device: deviceBlocks(request, device, mode),
    cloud: [...cloudBlocks(request, cloud, mode), ...budgetBlocks(request, cost, policy, mode)],
  };
}

function modeOf(request: RouteRequest, policy: Policy): Mode {
  return request.private ? "device_only" : (request.mode ?? policy.mode);
}

/** The cloud's price of a prompt and its answer, in the policy's unit. */
export function costOf(
  promptTokens: number,
  answerTokens: number,
  cloud: CloudState,
  policy: Policy,
): number {
  if (policy.budget_unit === "tokens") return promptTokens + answerTokens;
  return (promptTokens * cloud.price_in + answerTokens * cloud.price_out) / 1e6;
}

/** Predicts times on the device; null while its prefill speed is unknown. */
export function predictDevice(request: RouteRequest, device: DeviceState): Prediction | null {
  if (!device.prefill_tps) return null;
  const fresh = Math.max(request.prompt_tokens - request.conversation.cached_device, 0);
  return prediction(device.queue_seconds + fresh / device.prefill_tps, request, device.decode_tps);
}

/** Predicts times in the cloud; null while its round trip is unknown. */
export function predictCloud(request: RouteRequest, cloud: CloudState): Prediction | null {
  if (cloud.round_trip === null) return null;
  const fresh = Math.max(request.prompt_tokens - request.conversation.cached_cloud, 0);
  const prefill = cloud.prefill_tps ? fresh / cloud.prefill_tps : 0;
  return prediction(cloud.round_trip + cloud.queue_seconds + prefill, request, cloud.decode_tps);
}

function prediction(ttft: number, request: RouteRequest, decodeTps: number | null): Prediction {
  const answer = Math.min(request.expected_tokens ?? request.max_tokens, request.max_tokens);
  return { ttft, total: decodeTps ? ttft + answer / decodeTps : null };
}

/** The reasons why the device cannot answer. */
function deviceBlocks(request: RouteRequest, device: DeviceState, mode: Mode): Reason[] {
  const blocks = mode === "cloud_only" ? [reason("mode", "device", mode)] : [];
  if (!device.available) return [...blocks, reason("unavailable", "device", device.why)];
  if (request.private && !device.here) blocks.push(reason("elsewhere", "device", device.why));
  const needed = request.prompt_tokens + request.max_tokens;
  if (needed > device.context) blocks.push(reason("context", "device", needed, device.context));
  if (needed > device.free_kv_tokens)
    blocks.push(reason("kv_memory", "device", needed, device.free_kv_tokens));
  return [...blocks, ...lacking(request, "device", device.features)];
}

/** The reasons why the cloud cannot, or must not, answer. */
function cloudBlocks(request: RouteRequest, cloud: CloudState, mode: Mode): Reason[] {
  if (request.private) return [reason(request.quotes_private ? "private_quote" : "private", "cloud")];
  const blocks = mode === "device_only" ? [reason("mode", "cloud", mode)] : [];
  if (!cloud.available)
    return [...blocks, reason(cloud.why === "offline" ? "offline" : "unavailable", "cloud", cloud.why)];
  if (cloud.breaker === "open") blocks.push(reason("breaker_open", "cloud", cloud.retry_after));
  else if (cloud.retry_after > 0) blocks.push(reason("retry_after", "cloud", cloud.retry_after));
  const needed = request.prompt_tokens + request.max_tokens;
  if (cloud.context !== null && needed > cloud.context)
    blocks.push(reason("context", "cloud", needed, cloud.context));
  return [...blocks, ...lacking(request, "cloud", cloud.features)];
}

function lacking(request: RouteRequest, side: Side, has: readonly string[]): Reason[] {
  const missing = new Set(request.features.filter((feature) => !has.includes(feature)));
  return [...missing].sort().map((feature) => reason("feature", side, feature));
}

/** The budgets that the call could exceed. A cloud_only request is not bound by budgets. */
function budgetBlocks(request: RouteRequest, cost: number, policy: Policy, mode: Mode): Reason[] {
  if (mode === "device_only" || mode === "cloud_only") return [];
  const blocks: Reason[] = [];
  const held = (code: "budget_conversation" | "budget_day", total: number): void => {
    const limit = policy[code];
    if (limit !== null && total > limit) blocks.push(reason(code, "cloud", total, limit));
  };
  held("budget_conversation", request.conversation.spent + cost);
  held("budget_day", policy.spent_day + cost);
  return blocks;
}

interface Case {
  readonly request: RouteRequest;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  readonly policy: Policy;
  readonly mode: Mode;
  readonly predicted: RouteDecision["predicted"];
}

interface Wanted {
  readonly side: Side;
  readonly reasons: readonly Reason[];
}

/** The side where the request should go if both could take it. */
function wantedSide(given: Case): Wanted {
  const { mode, request, policy } = given;
  // The other side's block is the only reason.
  if (mode === "device_only") return { side: "device", reasons: [] };
  if (mode === "cloud_only") return { side: "cloud", reasons: [] };
  if (mode === "prefer_device") return { side: "device", reasons: [reason("preferred", "device", mode)] };
  if (mode === "prefer_cloud") return { side: "cloud", reasons: [reason("preferred", "cloud", mode)] };
  const { difficulty } = request;
  const threshold = policy.difficulty_threshold;
  if (difficulty !== null && difficulty >= threshold)
    return { side: "cloud", reasons: [reason("hard", "device", difficulty, threshold)] };
  const slow = slowness(given);
  if (slow.length > 0) return { side: "cloud", reasons: slow };
  const power = powerNeeds(given.device, policy);
  const pressing = power.length > 0 ? power : stickiness(given);
  if (pressing.length > 0 && given.cloud.metered)
    return { side: "device", reasons: [reason("metered", "cloud")] };
  if (pressing.length > 0) return { side: "cloud", reasons: pressing };
  if (difficulty !== null)
    return { side: "device", reasons: [reason("easy", "device", difficulty, threshold)] };
  return { side: "device", reasons: [reason("preferred", "device")] };
}

/**
 * The objectives that the device misses, where the cloud is expected to be faster or its speed is unknown.
 */
function slowness({ predicted: { device, cloud }, policy }: Case): Reason[] {
  if (device === null) return [];
  const reasons: Reason[] = [];
  const { ttft, completion } = policy;
  if (ttft !== null && device.ttft > ttft && (cloud === null || cloud.ttft < device.ttft))
    reasons.push(reason("slow_ttft", "device", device.ttft, ttft));
  if (completion !== null && device.total !== null && device.total > completion) {
    const other = cloud?.total ?? null;
    if (other === null || other < device.total)
      reasons.push(reason("slow_total", "device", device.total, completion));
  }
  return reasons;
}

/** The reasons of the device's battery to use the cloud. */
function powerNeeds(device: DeviceState, policy: Policy): Reason[] {
  if (device.charging) return [];
  const reasons: Reason[] = [];
  if (device.battery !== null && device.battery < policy.battery_floor)
    reasons.push(reason("battery", "device", device.battery, policy.battery_floor));
  if (device.power_saver) reasons.push(reason("power_saver", "device"));
  return reasons;
}

/**
 * The reason to stay in the cloud: the conversation's cache is warm there, and a prefill on the device takes
 * too long or an unknown time.
 */
function stickiness({ request, device, policy }: Case): Reason[] {
  const { last_route, cached_cloud, cached_device } = request.conversation;
  if (last_route !== "cloud" || cached_cloud <= cached_device) return [];
  const fresh = Math.max(request.prompt_tokens - cached_device, 0);
  const seconds = device.prefill_tps ? fresh / device.prefill_tps : null;
  if (seconds !== null && seconds <= policy.sticky_seconds) return [];
  return [reason("sticky", "cloud", seconds, policy.sticky_seconds)];
}
