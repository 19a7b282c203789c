import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { retryAfter } from "../src/routing/cloud.js";
import { decide } from "../src/routing/decide.js";
import { PlatformHints } from "../src/routing/hints.js";
import { parsePolicy } from "../src/routing/policy.js";
import { describeReason } from "../src/routing/reasons.js";
import { events } from "../src/routing/sse.js";
import { within } from "../src/routing/wait.js";

describe("server-sent events", () => {
  const read = async (parts: readonly Uint8Array[]): Promise<unknown[]> => {
    const body = new ReadableStream<Uint8Array>({
      start: (controller) => {
        for (const part of parts) controller.enqueue(part);
        controller.close();
      },
    });
    const found: unknown[] = [];
    for await (const value of events(body)) found.push(value);
    return found;
  };

  test("wherever the bytes are cut", async () => {
    const text =
      ': hello\r\n\r\ndata: {"a":"é😀"}\r\n\r\nevent: x\ndata:{"a":2}\n\ndata: [DONE]\n\ndata: {"a":3}\n\n';
    const bytes = new TextEncoder().encode(text);
    for (let cut = 0; cut <= bytes.length; cut++)
      expect(await read([bytes.subarray(0, cut), bytes.subarray(cut)])).toEqual([{ a: "é😀" }, { a: 2 }]);
  });

  test("a last line without an end counts", async () => {
    expect(await read([new TextEncoder().encode('data: {"a":1}')])).toEqual([{ a: 1 }]);
  });

  test("leaving the loop cancels the body", async () => {
    const cancel = vi.fn();
    const body = new ReadableStream<Uint8Array>({
      pull: (controller) => controller.enqueue(new TextEncoder().encode("data: 1\n\n")),
      cancel,
    });
    for await (const value of events(body)) if (value === 1) break;
    expect(cancel).toHaveBeenCalledOnce();
  });
});

describe("waiting", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());
  const late = (suspended: boolean): Error => new Error(suspended ? "suspended" : "late");
  const never = new Promise<never>(() => undefined);

  test("ends when its time is over", async () => {
    const waiting = within(never, 5, late);
    const ended = expect(waiting).rejects.toThrow("late");
    await vi.advanceTimersByTimeAsync(5000);
    await ended;
  });

  test("a page that was suspended gives its peer two more seconds", async () => {
    let answer = (_: string): void => undefined;
    const peer = new Promise<string>((resolve) => {
      answer = resolve;
    });
    const alive = within(peer, 5, late);
    const silent = within(never, 5, late);
    const ended = expect(silent).rejects.toThrow("suspended");
    // The clock has advanced, the timers have not.
    vi.setSystemTime(Date.now() + 60_000);
    await vi.advanceTimersByTimeAsync(5000);
    await vi.advanceTimersByTimeAsync(1000);
    answer("still here");
    expect(await alive).toBe("still here");
    await vi.advanceTimersByTimeAsync(1000);
    await ended;
  });

  test("ends with the signal", async () => {
    const controller = new AbortController();
    const ended = expect(within(never, 5, late, controller.signal)).rejects.toMatchObject({
      name: "AbortError",
    });
    controller.abort();
    await ended;
    await expect(within(never, 5, late, controller.signal)).rejects.toMatchObject({ name: "AbortError" });
  });
});

test("Retry-After is seconds or a date", () => {
  expect(retryAfter("2.5")).toBe(2.5);
  expect(retryAfter("Thu, 01 Jan 2026 00:00:30 GMT", Date.UTC(2026, 0, 1))).toBe(30);
  expect(retryAfter("Thu, 01 Jan 2026 00:00:00 GMT", Date.UTC(2026, 0, 2))).toBe(0);
  expect([retryAfter(null), retryAfter(""), retryAfter("soon")]).toEqual([null, null, null]);
});

test("hints are what the platform tells", async () => {
  const battery = { level: 0.1, charging: false };
  const connection = { saveData: true };
  const hints = new PlatformHints({ onLine: false, connection, getBattery: () => Promise.resolve(battery) });
  await Promise.resolve();
  expect(hints.read()).toEqual({ online: false, battery: 0.1, charging: false, metered: true });
  battery.level = 0.05;
  expect(hints.read().battery).toBe(0.05);
  const refused = new PlatformHints({ getBattery: () => Promise.reject(new Error("no")) });
  expect(refused.read()).toEqual({ online: true, battery: null, charging: null, metered: null });
});

/** Small generator of random numbers, so that a failure can be repeated (Mulberry32). */
function generator(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

test("for every random state the decision obeys the hard rules", () => {
  const random = generator(5);
  const pick = <T>(...values: readonly T[]): T => values[Math.floor(random() * values.length)] as T;
  const modes = ["device_only", "prefer_device", "auto", "prefer_cloud", "cloud_only"] as const;
  for (let i = 0; i < 5000; i++) {
    const request = {
      prompt_tokens: Math.floor(random() * 2000),
      max_tokens: Math.floor(random() * 1000) + 1,
      expected_tokens: pick(null, 50),
      features: pick([], ["tools"] as const, ["logprobs"] as const),
      difficulty: pick(null, random()),
      mode: pick(null, ...modes),
      private: pick(false, false, true),
      quotes_private: false,
      conversation: {
        last_route: pick(null, "device" as const, "cloud" as const),
        cached_device: pick(0, 500),
        cached_cloud: pick(0, 900),
        spent: random() * 3000,
      },
    };
    const device = {
      available: pick(true, true, false),
      why: null,
      context: 2048,
      free_kv_tokens: pick(0, 1024, 4096),
      features: pick([], ["logprobs"] as const),
      prefill_tps: pick(null, 100),
      decode_tps: pick(null, 20),
      queue_seconds: pick(0, 3),
      battery: pick(null, random()),
      charging: pick(null, true, false),
      power_saver: pick(null, true),
      here: pick(true, true, false),
    };
    const cloud = {
      available: pick(true, true, false),
      why: pick(null, "offline"),
      breaker: pick("closed" as const, "closed" as const, "half_open" as const, "open" as const),
      retry_after: pick(0, 0, 4),
      context: pick(null, 1500),
      features: pick(["tools", "logprobs"] as const, []),
      round_trip: pick(null, 0.3),
      queue_seconds: 0,
      prefill_tps: null,
      decode_tps: pick(null, 80),
      metered: pick(null, true),
      price_in: 1,
      price_out: 2,
    };
    const policy = parsePolicy({
      mode: pick(...modes),
      budget_conversation: pick(null, 2500),
      budget_day: pick(null, 4000),
      spent_day: random() * 4000,
      ttft: pick(null, 2),
    });
    const decision = decide(request, device, cloud, policy);
    expect(decide(request, device, cloud, policy)).toEqual(decision);
    const mode = request.private ? "device_only" : (request.mode ?? policy.mode);
    const needed = request.prompt_tokens + request.max_tokens;
    const sides = [decision.route, decision.fallback];
    if (mode === "device_only") expect(sides).not.toContain("cloud");
    if (mode === "cloud_only") expect(sides).not.toContain("device");
    if (sides.includes("device")) {
      expect(device.available && needed <= device.context && needed <= device.free_kv_tokens).toBe(true);
      expect(request.features.every((feature) => device.features.includes(feature as never))).toBe(true);
    }
    if (sides.includes("cloud")) {
      expect(cloud.available && cloud.breaker !== "open" && cloud.retry_after === 0).toBe(true);
      expect(needed <= (cloud.context ?? needed)).toBe(true);
      expect(request.features.every((feature) => cloud.features.includes(feature as never))).toBe(true);
      if (mode !== "cloud_only") {
        expect(request.conversation.spent + needed).toBeLessThanOrEqual(
          policy.budget_conversation ?? Number.POSITIVE_INFINITY,
        );
        expect(policy.spent_day + needed).toBeLessThanOrEqual(policy.budget_day ?? Number.POSITIVE_INFINITY);
      }
    }
    if (decision.route === null) expect(decision.reasons.length).toBeGreaterThan(0);
    expect(decision.reasons.map(describeReason).join()).not.toMatch(/undefined|null|NaN/);
  }
});
