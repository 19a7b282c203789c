import { readFileSync } from "node:fs";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import {
  type Chunk,
  type Completion,
  type DecisionRecord,
  HybridClient,
  type HybridOptions,
  type HybridRequest,
  type KeptState,
} from "../src/routing/index.js";
import { FakeCloud, FakeDevice, TEXT, WORDS } from "./support/sides.js";

/** Milliseconds within which a side hears that it is left. */
const PATIENCE_MS = 20_000;

const MESSAGES = [{ role: "user", content: "Recite." }];
const HINTS = { read: () => ({ online: true, battery: null, charging: null, metered: null }) };
const QUICK = { retry: { base: 0.001, cap: 0.002 }, ttft: null };
const CHANCES = { retry: { ...QUICK.retry, before_fallback: 2 } };

let device: FakeDevice;
let cloud: FakeCloud;
let records: DecisionRecord[];
let difficulty: number | null;

beforeEach(async () => {
  device = new FakeDevice();
  cloud = await new FakeCloud().start();
  records = [];
  difficulty = null;
});
afterEach(() => cloud.stop());

function client(options: Partial<HybridOptions> = {}): HybridClient {
  const onRecord = (record: DecisionRecord): void => void records.push(record);
  const { policy, ...rest } = options;
  return new HybridClient({
    device,
    cloud: { baseURL: cloud.url, apiKey: "secret" },
    hints: HINTS,
    onRecord,
    difficulty: () => difficulty,
    policy: { ...QUICK, ...policy },
    ...rest,
  });
}

function ask(made: HybridClient, request: Partial<HybridRequest> = {}): Promise<Completion> {
  return made.chat.completions.create({ messages: MESSAGES, ...request, stream: false });
}

async function streamed(made: HybridClient, request: Partial<HybridRequest> = {}): Promise<Chunk[]> {
  const chunks: Chunk[] = [];
  for await (const chunk of await made.chat.completions.create({
    messages: MESSAGES,
    ...request,
    stream: true,
  }))
    chunks.push(chunk);
  return chunks;
}

function textOf(chunks: readonly Chunk[]): string {
  return chunks.map(({ choices }) => choices[0]?.delta.content ?? "").join("");
}

describe("a route", () => {
  test("the easy stays: nothing is sent", async () => {
    difficulty = 0.1;
    const answer = await ask(client());
    expect(answer.choices[0]?.message.content).toBe(TEXT);
    expect(answer.x_nearfar).toMatchObject({
      route: "device",
      path: ["device"],
      degraded: false,
      spent: 0,
      saved: 50,
    });
    expect(answer.x_nearfar.reasons).toEqual([{ code: "easy", side: "device", value: 0.1, limit: 0.5 }]);
    expect(answer.usage).toMatchObject({ prompt_tokens: 10, completion_tokens: 40, total_tokens: 50 });
    expect(cloud.connections).toBe(0);
    expect(records).toMatchObject([{ decision: { route: "device" }, outcome: { finish: "stop", spent: 0 } }]);
  });

  test("the hard goes, with the key and the model that the server lists", async () => {
    difficulty = 0.9;
    const answer = await ask(client(), { temperature: 0 });
    expect(answer.choices[0]?.message.content).toBe(TEXT);
    expect(answer.x_nearfar).toMatchObject({ route: "cloud", spent: 52, saved: 0 });
    expect(cloud.requests).toMatchObject([{ model: "far", stream: true, temperature: 0, max_tokens: 512 }]);
    expect(cloud.requests[0]).not.toHaveProperty("x_nearfar");
    expect(cloud.authorizations).toEqual(["Bearer secret"]);
  });

  test("the long goes, and what no side takes is refused with the reasons", async () => {
    const long = [{ role: "user", content: "a".repeat(900) }];
    expect((await ask(client(), { messages: long })).x_nearfar.route).toBe("cloud");
    const refused = ask(client(), { messages: long, x_nearfar: { private: true } });
    await expect(refused).rejects.toThrow(
      /device: 1.* tokens do not fit the context of 1000.*the request is private/,
    );
  });

  test("a text of parts stays, an image and tools go", async () => {
    const parts = [{ role: "user", content: [{ type: "text", text: "Recite." }] }];
    await ask(client(), { messages: parts });
    expect(device.requests[0]?.messages).toEqual([{ role: "user", content: "Recite." }]);
    const image = [{ role: "user", content: [{ type: "image_url", image_url: { url: "data:," } }] }];
    expect((await ask(client(), { messages: image })).x_nearfar.route).toBe("cloud");
    expect((await ask(client(), { tools: [{ type: "function" }] })).x_nearfar.route).toBe("cloud");
  });

  test("the policy's budgets hold over calls, and are kept", async () => {
    const writes: KeptState[] = [];
    const store = { read: () => writes.at(-1) ?? null, write: (state: KeptState) => void writes.push(state) };
    const policy = { mode: "prefer_cloud", budget_day: 250 } as const;
    const request = { max_tokens: 40 };
    expect((await ask(client({ policy, store }), request)).x_nearfar.route).toBe("cloud");
    const routes = [];
    for (let i = 0; i < 5; i++) routes.push((await ask(client({ policy, store }), request)).x_nearfar.route);
    expect(routes.at(-1)).toBe("device");
    expect(writes.at(-1)).toMatchObject({
      ledger: { spent: 52 * (1 + routes.filter((route) => route === "cloud").length) },
    });
  });

  test("shadow mode answers from its side and records the decision", async () => {
    difficulty = 0.9;
    const answer = await ask(client({ policy: { shadow: "device" } }));
    expect(answer.x_nearfar).toMatchObject({ route: "device", would_route: "cloud" });
    expect(records).toMatchObject([{ would: { route: "cloud" }, outcome: { path: ["device"] } }]);
    expect(cloud.connections).toBe(0);
  });

  test("a target share moves the threshold", async () => {
    const made = client({ policy: { target_share: 0.5, difficulty_threshold: 0.9 } });
    const routes = [];
    difficulty = 0.6;
    for (let i = 0; i < 30; i++) routes.push((await ask(made)).x_nearfar.route);
    expect(routes[0]).toBe("device");
    expect(routes).toContain("cloud");
  });
});

interface Fields {
  readonly name: string;
  readonly request: Partial<HybridRequest>;
  readonly sent: object;
  readonly refused: string | null;
}

/** Python passes the same cases (tests/unit/hybrid/test_client.py). */
const FIELDS = JSON.parse(
  readFileSync(new URL("../../tests/vectors/routing/device_fields.json", import.meta.url), "utf8"),
) as readonly Fields[];

describe("a request's fields on the device", () => {
  test.each(FIELDS)("$name", async ({ request, sent, refused }) => {
    const alone = ask(client(), { ...request, x_nearfar: { mode: "device_only" } });
    if (refused === null) expect((await alone).x_nearfar.route).toBe("device");
    else
      await expect(alone).rejects.toMatchObject({
        name: "RequestError",
        param: refused,
        message: expect.stringContaining(`unknown parameter ${refused}`),
      });
    const { messages, stream, stream_options, signal, max_tokens, ...fields } = device.requests[0] ?? {};
    expect({ ...fields, ...("max_tokens" in sent && { max_tokens }) }).toEqual(sent);
    if (refused === null) return;
    const routed = await ask(client(), request);
    expect(routed.x_nearfar.route).toBe("cloud");
    expect(routed.x_nearfar.reasons.at(-1)).toMatchObject({ code: "refused", value: refused });
    expect(cloud.requests[0]).toMatchObject(sent);
  });
});

describe("a stream", () => {
  test("says where it comes from first and last, and comes in order", async () => {
    const chunks = await streamed(client(), { stream_options: { include_usage: true }, max_tokens: 5 });
    expect(textOf(chunks)).toBe(WORDS.slice(0, 5).join(""));
    expect(chunks.map(({ x_nearfar }) => x_nearfar !== undefined)).toEqual([
      true,
      ...Array(5).fill(false),
      true,
      true,
    ]);
    expect(chunks[0]?.choices[0]?.delta).toEqual({ role: "assistant", content: "" });
    expect(chunks.at(-2)?.choices[0]?.finish_reason).toBe("length");
    expect(chunks.at(-1)).toMatchObject({ choices: [], usage: { completion_tokens: 5 } });
    expect(new Set(chunks.map(({ id }) => id)).size).toBe(1);
  });

  test.each(["device", "cloud"] as const)("that is left ends the work on the %s", async (side) => {
    const mode = `${side}_only` as const;
    cloud.stallAfter = 3;
    const chunks = await client().chat.completions.create({
      messages: MESSAGES,
      stream: true,
      x_nearfar: { mode },
    });
    for await (const chunk of chunks) if (chunk.choices[0]?.delta.content) break;
    await vi.waitFor(() => expect(side === "device" ? device.ended : cloud.aborted).toBe(1), PATIENCE_MS);
    expect(records).toMatchObject([{ outcome: { finish: null, error: "stopped" } }]);
  });

  test.each([
    ["device_only", undefined],
    ["cloud_only", undefined],
    ["device_only", new Error("mine")],
    ["cloud_only", new DOMException("late", "TimeoutError")],
  ] as const)("%s: ends with the caller's signal, for its reason (%s)", async (mode, reason) => {
    device.stallAfter = cloud.stallAfter = 3;
    const controller = new AbortController();
    const chunks = await client().chat.completions.create({
      messages: MESSAGES,
      stream: true,
      signal: controller.signal,
      x_nearfar: { mode },
    });
    const read = (async () => {
      for await (const chunk of chunks)
        if (chunk.choices[0]?.delta.content === "w2 ") controller.abort(reason);
    })();
    const failure = await read.catch((error: unknown) => error);
    expect(failure).toBe(controller.signal.reason);
    expect(failure).toMatchObject({ name: reason?.name ?? "AbortError" });
    if (mode === "cloud_only") await vi.waitFor(() => expect(cloud.aborted).toBe(1), PATIENCE_MS);
    expect(records).toMatchObject([{ outcome: { finish: null, error: "stopped" } }]);
  });
});

describe("a stream that nobody reads", () => {
  const policy = { mode: "prefer_cloud", budget_day: 200 } as const;
  const unread = (made: HybridClient, signal?: AbortSignal): Promise<AsyncIterable<Chunk>> =>
    made.chat.completions.create({
      messages: MESSAGES,
      max_tokens: 100,
      stream: true,
      ...(signal && { signal }),
    });

  test("gives its budget back when its signal says so", async () => {
    const made = client({ policy });
    const controller = new AbortController();
    await unread(made, controller.signal);
    expect((await ask(made, { max_tokens: 100 })).x_nearfar.route).toBe("device");
    controller.abort();
    expect(records.at(-1)).toMatchObject({ outcome: { error: "stopped" } });
    expect((await ask(made, { max_tokens: 100 })).x_nearfar.route).toBe("cloud");
    expect(records).toHaveLength(3);
  });

  test("gives it back when nobody holds it any more", async () => {
    setFlagsFromString("--expose-gc");
    const collect = runInNewContext("gc") as () => void;
    const made = client({ policy });
    await unread(made);
    await vi.waitFor(
      () => {
        collect();
        expect(records.at(-1)).toMatchObject({ outcome: { error: "stopped" } });
      },
      { timeout: 20_000, interval: 50 },
    );
    expect((await ask(made, { max_tokens: 100 })).x_nearfar.route).toBe("cloud");
  });

  test("adds no listener for each token to a signal that lives long", async () => {
    const { signal } = new AbortController();
    const added = vi.spyOn(signal, "addEventListener");
    for await (const _ of await unread(client({ policy }), signal));
    expect(added).toHaveBeenCalledOnce();
  });
});

test("another policy brings its own retry budget and breakers", async () => {
  difficulty = 0.9;
  cloud.refusals = { status: 500, count: 1000 };
  const breaker = { failures: 1000 };
  const made = client({ policy: { retry: { ...CHANCES.retry, burst: 0, ratio: 0 }, breaker } });
  await ask(made);
  expect(cloud.requests).toHaveLength(1);
  made.setPolicy({ ...QUICK, retry: { ...CHANCES.retry, burst: 2, ratio: 0 }, breaker });
  await ask(made);
  expect(cloud.requests).toHaveLength(1 + 3);
  device.failAfter = 0;
  made.setPolicy({
    ...QUICK,
    mode: "prefer_device",
    device_breaker: { failures: 1, seconds: 60 },
    retry: { attempts: 0 },
  });
  await expect(ask(made)).rejects.toMatchObject({ name: "CloudError" });
  device.failAfter = Number.POSITIVE_INFINITY;
  expect((await ask(made).catch(() => null))?.x_nearfar.route ?? "cloud").toBe("cloud");
  made.setPolicy({ ...QUICK, mode: "prefer_device", device_breaker: { failures: 2, seconds: 60 } });
  expect((await ask(made)).x_nearfar.path).toEqual(["device"]);
});

describe("the cloud fails", () => {
  beforeEach(() => {
    difficulty = 0.9;
  });

  test("it is down: the device answers, degraded; after three failures it is left alone", async () => {
    await cloud.stop();
    const made = client({ policy: { retry: { attempts: 0 } } });
    for (let i = 0; i < 3; i++) {
      const { choices, x_nearfar } = await ask(made);
      expect(choices[0]?.message.content).toBe(TEXT);
      expect(x_nearfar).toMatchObject({ route: "device", path: ["device"], degraded: true });
      expect(x_nearfar.reasons.at(-1)).toMatchObject({ code: "failed", side: "cloud", value: "connection" });
    }
    const { x_nearfar } = await ask(made);
    expect(x_nearfar).toMatchObject({ path: ["device"], degraded: true });
    expect(x_nearfar.reasons.map(({ code }) => code)).toEqual(["hard", "breaker_open"]);
    cloud = await new FakeCloud().start();
  });

  test("for a moment: by policy it gets other chances", async () => {
    cloud.refusals = { status: 503, count: 2 };
    const { x_nearfar } = await ask(client({ policy: CHANCES }));
    expect(x_nearfar).toMatchObject({ path: ["cloud"], degraded: false });
    expect(x_nearfar.reasons.slice(1)).toMatchObject([{ value: "503" }, { value: "503" }]);
    expect(cloud.requests).toHaveLength(3);
  });

  test("it has too much to do: the device answers now, the cloud is not asked before its time", async () => {
    cloud.refusals = { status: 429, headers: { "retry-after": "60" }, count: 1 };
    const made = client();
    expect((await ask(made)).x_nearfar).toMatchObject({ route: "device", degraded: true });
    expect((await ask(made)).x_nearfar.reasons.at(-1)).toMatchObject({ code: "retry_after" });
    expect(cloud.requests).toHaveLength(1);
  });

  test("without a device, Retry-After is waited for", async () => {
    cloud.refusals = { status: 429, headers: { "retry-after": "0.2" }, count: 1 };
    const started = Date.now();
    expect((await ask(client({ device: null }))).x_nearfar.route).toBe("cloud");
    expect(Date.now() - started).toBeGreaterThanOrEqual(190);
  });

  test("retries have a budget that all requests share", async () => {
    cloud.refusals = { status: 500, count: 1000 };
    const retry = { ...CHANCES.retry, burst: 3, ratio: 0 };
    const made = client({ policy: { retry, breaker: { failures: 1000 } } });
    for (let i = 0; i < 6; i++) await ask(made);
    expect(cloud.requests).toHaveLength(6 + 3);
  });

  test("a request that it refuses is the caller's", async () => {
    cloud.refusals = { status: 400, count: 1 };
    await expect(ask(client())).rejects.toMatchObject({ name: "RequestError" });
    expect(device.requests).toHaveLength(0);
  });

  test("a wrong key: the device answers, and the record says why", async () => {
    cloud.refusals = { status: 401, count: 1 };
    const { x_nearfar } = await ask(client());
    expect(x_nearfar).toMatchObject({ route: "device", degraded: true });
    expect(x_nearfar.reasons.at(-1)?.value).toBe("401");
  });

  test.each(["cutAfter", "endAfter"] as const)(
    "in the middle (%s): the device goes on, nothing comes twice",
    async (how) => {
      cloud[how] = 7;
      const chunks = await streamed(client());
      expect(textOf(chunks)).toBe(TEXT);
      expect(chunks.at(-1)?.x_nearfar).toMatchObject({ path: ["cloud", "device"], degraded: true });
      expect(device.requests[0]).toMatchObject({ continue_final_message: true, max_tokens: 512 - 7 });
    },
  );

  test("in the middle: by policy the cloud itself goes on", async () => {
    cloud.cutAfter = 7;
    const chunks = await streamed(client({ policy: { after_cut: "cloud" } }));
    expect(textOf(chunks)).toBe(TEXT);
    expect(chunks.at(-1)?.x_nearfar).toMatchObject({ path: ["cloud"], degraded: false });
    expect(cloud.requests[1]).toMatchObject({ continue_final_message: true, add_generation_prompt: false });
  });

  test("it falls silent: the device goes on", async () => {
    cloud.stallAfter = 4;
    const chunks = await streamed(client({ policy: { timeouts: { between: 0.1 } } }));
    expect(textOf(chunks)).toBe(TEXT);
    await vi.waitFor(() => expect(cloud.aborted).toBe(1), PATIENCE_MS);
  });

  test("a tool call cannot be taken over in the middle", async () => {
    cloud.cutAfter = 3;
    const read = streamed(client({ device_features: ["tools"] }), { tools: [{ type: "function" }] });
    await expect(read).rejects.toMatchObject({ name: "CloudError" });
  });
});

describe("the device fails", () => {
  test("in the middle: the cloud goes on, and the text is whole", async () => {
    device.failAfter = 9;
    const onDeviceLost = vi.fn();
    const made = client({ onDeviceLost, policy: { device_breaker: { failures: 1 } } });
    const chunks = await streamed(made, { max_tokens: 30 });
    expect(textOf(chunks)).toBe(WORDS.slice(0, 30).join(""));
    expect(chunks.at(-1)?.x_nearfar).toMatchObject({
      route: "cloud",
      path: ["device", "cloud"],
      degraded: false,
    });
    expect(cloud.requests).toMatchObject([{ max_tokens: 21, continue_final_message: true }]);
    expect(onDeviceLost).toHaveBeenCalledOnce();
    const next = await ask(made);
    expect(next.x_nearfar).toMatchObject({ path: ["cloud"] });
    expect(next.x_nearfar.reasons[0]).toMatchObject({ code: "unavailable", value: "failed lately" });
    made.device = new FakeDevice();
    expect((await ask(made)).x_nearfar.path).toEqual(["device"]);
  });

  test("it falls silent: the cloud goes on", async () => {
    device.stallAfter = 9;
    const chunks = await streamed(client({ policy: { timeouts: { device_between: 0.05 } } }));
    expect(textOf(chunks)).toBe(TEXT);
  });

  test.each([{ private: true }, { mode: "device_only" }] as const)(
    "with %o nothing is ever sent",
    async (own) => {
      device.failAfter = 9;
      const made = client({ policy: { hedge_seconds: 0 } });
      // Every attempt goes to it: nobody else may answer.
      for (let i = 0; i < 3; i++)
        await expect(streamed(made, { x_nearfar: own })).rejects.toThrow("The GPU device was lost");
      made.device = null;
      await expect(streamed(made, { x_nearfar: own })).rejects.toMatchObject({ name: "RouteError" });
      expect(cloud.connections).toBe(0);
    },
  );

  test("a cloud that cannot continue is not asked to", async () => {
    device.failAfter = 9;
    const made = client({ cloud: { baseURL: cloud.url, continues: false } });
    await expect(streamed(made)).rejects.toMatchObject({ name: "DeviceError" });
    device.failAfter = 0;
    made.device = device;
    expect(textOf(await streamed(made))).toBe(TEXT);
  });
});

describe("escalation", () => {
  const monitor = { logprob: -2, window: 4, min_tokens: 4 };

  test("the device is unsure: the cloud continues", async () => {
    device.unsureFrom = 10;
    const chunks = await streamed(client({ policy: { escalation: "continue", monitor } }));
    expect(textOf(chunks)).toBe(TEXT);
    expect(chunks.at(-1)?.x_nearfar).toMatchObject({ path: ["device", "cloud"], degraded: false });
    expect(chunks.at(-1)?.x_nearfar?.reasons.at(-1)).toMatchObject({ code: "low_logprob", limit: -2 });
    // The caller did not ask for logprobs.
    expect(chunks.every(({ choices }) => !choices[0]?.logprobs)).toBe(true);
    expect(cloud.requests).toMatchObject([{ continue_final_message: true }]);
  });

  test("within what is held back: the cloud begins again", async () => {
    device.unsureFrom = 2;
    const chunks = await streamed(client({ policy: { escalation: "restart", hold_tokens: 12, monitor } }));
    expect(textOf(chunks)).toBe(TEXT);
    expect(cloud.requests[0]).not.toHaveProperty("continue_final_message");
  });

  test("what is sure enough stays, also where the artifact has no logprobs", async () => {
    const policy = { escalation: "continue", hold_tokens: 12, monitor } as const;
    expect((await ask(client({ policy }))).x_nearfar.path).toEqual(["device"]);
    device.hasLogprobs = false;
    const { choices, x_nearfar } = await ask(client({ policy }));
    expect(choices[0]?.message.content).toBe(TEXT);
    expect(x_nearfar.path).toEqual(["device"]);
  });

  test("an unsure private answer stays", async () => {
    device.unsureFrom = 0;
    const policy = { escalation: "continue", monitor } as const;
    expect(
      (await ask(client({ policy }), { x_nearfar: { private: true } })).choices[0]?.message.content,
    ).toBe(TEXT);
    expect(cloud.connections).toBe(0);
  });
});

describe("hedging", () => {
  test("the faster side answers, the other one is ended", async () => {
    device.delay = 2000;
    const chunks = await streamed(client({ policy: { hedge_seconds: 0.02 } }));
    expect(textOf(chunks)).toBe(TEXT);
    expect(chunks.at(-1)?.x_nearfar).toMatchObject({ route: "cloud", path: ["cloud"] });
    expect(chunks.at(-1)?.x_nearfar?.reasons.at(-1)).toMatchObject({ code: "hedged" });
    await vi.waitFor(() => expect(device.ended).toBe(1), PATIENCE_MS);
  });

  test("a quick side is alone", async () => {
    expect((await ask(client({ policy: { hedge_seconds: 5 } }))).x_nearfar.path).toEqual(["device"]);
    expect(cloud.connections).toBe(0);
  });

  test("both slow, the first one fails: the other one answers", async () => {
    device.delay = 60;
    device.failAfter = 0;
    cloud.delay = 120;
    const answer = await ask(client({ policy: { hedge_seconds: 0.01 } }));
    expect(answer.choices[0]?.message.content).toBe(TEXT);
    expect(answer.x_nearfar.path).toEqual(["cloud"]);
  });
});

test("records hold no text unless the policy allows it", async () => {
  const made = client();
  await ask(made, { messages: [{ role: "user", content: "a secret" }] });
  expect(made.exportRecords()).not.toMatch(/secret|w1 /);
  expect(
    made
      .exportRecords()
      .trimEnd()
      .split("\n")
      .map((line) => JSON.parse(line) as unknown),
  ).toHaveLength(1);
  const open = client({ policy: { record_text: true } });
  await ask(open, { messages: [{ role: "user", content: "no secret" }] });
  expect(open.exportRecords()).toContain("no secret");
});

test("offline: the cloud is not asked, except on this machine", async () => {
  const hints = { read: () => ({ ...HINTS.read(), online: false }) };
  const far = client({ hints, cloud: { baseURL: "https://cloud.invalid/v1" } });
  difficulty = 0.9;
  const answer = await ask(far);
  expect(answer.x_nearfar).toMatchObject({ route: "device", degraded: true });
  expect(answer.x_nearfar.reasons.at(-1)?.code).toBe("offline");
  difficulty = 0.9;
  expect((await ask(client({ hints }))).x_nearfar.route).toBe("cloud");
});

test("what the client does not know, it refuses", async () => {
  const made = client();
  for (const x_nearfar of [{ privat: true }, { private: "yes" }, { mode: "cloudy" }])
    await expect(ask(made, { x_nearfar: x_nearfar as never })).rejects.toMatchObject({ param: "x_nearfar" });
  await expect(ask(made, { n: 2 } as never)).rejects.toMatchObject({ param: "n" });
  await expect(ask(made, { messages: [] })).rejects.toMatchObject({ param: "messages" });
  expect(device.requests.length + cloud.connections).toBe(0);
});

test("calls at once cannot exceed a budget together", async () => {
  const made = client({ policy: { mode: "prefer_cloud", budget_day: 250 } });
  const answers = await Promise.all(Array.from({ length: 6 }, () => ask(made, { max_tokens: 40 })));
  const cost = answers.reduce((sum, { x_nearfar }) => sum + x_nearfar.spent, 0);
  expect(cost).toBeGreaterThan(0);
  expect(cost).toBeLessThanOrEqual(250);
});

test("a policy with a name that nobody knows is refused", () => {
  expect(() => client({ policy: { mood: "auto" } as never })).toThrow("no field mood; leave it out");
  expect(() => client({ policy: { budgetDay: 3 } as never })).toThrow("did you mean budget_day?");
  expect(() => client({ cloud: { baseUrl: "http://x" } as never })).toThrow("baseURL is undefined; give");
  expect(() => client({ device: "/model/" as never })).toThrow("give what createEngine(url) resolves to");
  expect(() => client({ policy: { difficulty_threshold: 2 } })).toThrow("from 0 to 1");
});
