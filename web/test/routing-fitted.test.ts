import { readFileSync } from "node:fs";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import {
  type Completion,
  type DecisionRecord,
  HybridClient,
  type HybridOptions,
  type HybridRequest,
  type PolicyOptions,
  type RouterModel,
} from "../src/routing/index.js";
import { FakeCloud, FakeDevice, TEXT } from "./support/sides.js";

const { router: ROUTER } = JSON.parse(
  readFileSync(new URL("../../tests/vectors/routing/router.json", import.meta.url), "utf8"),
) as { router: RouterModel };
const MESSAGES = [{ role: "user", content: "Recite." }];
const HINTS = { read: () => ({ online: true, battery: null, charging: null, metered: null }) };
const realFetch = fetch;
const PRIVATE = { x_nearfar: { private: true } };

let device: FakeDevice;
let cloud: FakeCloud;
let records: DecisionRecord[];

beforeEach(async () => {
  device = new FakeDevice();
  cloud = await new FakeCloud().start();
  records = [];
});
afterEach(async () => {
  vi.unstubAllGlobals();
  await cloud.stop();
  expect(device.held, "each prompt that was read is released").toBe(0);
});

/** A router whose probabilities, before the first token and after three tokens, are near 0 or 1. */
function routerOf(hard: boolean, doubtful: boolean, change: Partial<RouterModel> = {}): RouterModel {
  const flat = (features: readonly string[], bias: number): RouterModel["prompt"] => {
    const none = features.map(() => 0);
    return { features, mean: none, scale: none.map(() => 1), weights: none, bias, auroc: 0.5, probe: null };
  };
  const prompt = flat(["length", "entropy"], hard ? 5 : -5);
  return { ...ROUTER, prompt, answer: flat(["mean_logprob"], doubtful ? 5 : -5), limit: 0.6, ...change };
}

function client(policy: PolicyOptions, options: Partial<HybridOptions> = {}): HybridClient {
  const onRecord = (record: DecisionRecord): void => void records.push(record);
  const given = { ttft: null, retry: { base: 0.001, cap: 0.002 }, ...policy };
  return new HybridClient({
    ...{ device, cloud: { baseURL: cloud.url }, hints: HINTS, onRecord, policy: given },
    ...options,
  });
}

function ask(made: HybridClient, request: Partial<HybridRequest> = {}): Promise<Completion> {
  return made.chat.completions.create({ messages: MESSAGES, ...request, stream: false });
}

const codes = ({ x_nearfar }: Completion): string[] => x_nearfar.reasons.map(({ code }) => code);

describe("a fitted router", () => {
  test("decides by what the device's model shows, with its threshold", async () => {
    const easy = await ask(client({ router: routerOf(false, false) }));
    expect([easy.x_nearfar.route, codes(easy)]).toEqual(["device", ["easy"]]);
    expect(easy.x_nearfar.reasons[0]).toMatchObject({ limit: ROUTER.threshold });
    expect(device.requests).toMatchObject([{ max_tokens: 512 }]);
    expect(device.read).toMatchObject([{ tokens: [], perplexity: false }]);
    const hard = await ask(client({ router: routerOf(true, false) }));
    expect([hard.x_nearfar.route, codes(hard)]).toEqual(["cloud", ["hard"]]);
    const knowledge = { prompt_tokens: 10, top: [-0.1, -4], prompt_logprob: null, sure: null, row: [] };
    const artifact = `${"a".repeat(64)}/q4`;
    expect(records).toMatchObject([
      { knowledge, model: "near", artifact, outcome: { first_tokens: { length: 16 } } },
      { knowledge, outcome: { first_tokens: null } },
    ]);
  });

  test("is loaded from its address when it is needed, once", async () => {
    const load = vi.fn(async () => Response.json(routerOf(true, false)));
    vi.stubGlobal("fetch", (url: unknown, init: RequestInit) =>
      url === "/router.json" ? load() : realFetch(url as string, init),
    );
    const made = client({ router: "/router.json" });
    const secret = [{ role: "user", content: "My secret." }];
    const word = { messages: secret, ...PRIVATE };
    expect((await ask(made, word)).x_nearfar.route).toBe("device");
    expect(load).toHaveBeenCalledTimes(0);
    expect([codes(await ask(made)), codes(await ask(made))]).toEqual([["hard"], ["hard"]]);
    expect(load).toHaveBeenCalledTimes(1);
    expect(made.policy.difficulty_threshold).toBe(ROUTER.threshold);
    load.mockResolvedValueOnce(new Response("", { status: 404 }));
    await expect(ask(client({ router: "/router.json" }))).rejects.toThrow(
      "/router.json is not a router: HTTP 404",
    );
  });

  test.each([
    [{ artifact: "b/q8" }, /fitted to sample .checkpoint b, q8., but the device runs near .*aaa, q4.: fit/],
    [{ tokens: 0 }, /is not a router: tokens must be from 1 to 16; make one with nearfar route fit/],
  ])("is refused: %j", async (change, said) => {
    await expect(ask(client({ router: routerOf(false, false, change) }))).rejects.toMatchObject({
      name: "RequestError",
      param: "router",
      message: expect.stringMatching(said),
    });
  });

  test("looks at the last hidden row by its probe", async () => {
    const { prompt, answer } = routerOf(false, false);
    const probe = { tokens: [2, 0], weights: [30, -3], mean: -20 };
    const probed = { ...prompt, probe: { ...probe } };
    expect(codes(await ask(client({ router: routerOf(false, false, { prompt: probed }) })))).toEqual([
      "hard",
    ]);
    expect(device.read).toMatchObject([{ tokens: [2, 0] }]);
    const later = answer && { ...answer, probe: { tokens: [1, 0], weights: [-100, 100], mean: 0 } };
    const made = client({ router: routerOf(false, false, { answer: later }) });
    expect(codes(await ask(made))).toEqual(["easy", "doubtful"]);
  });

  test("asks the model itself if it looks at that", async () => {
    const asked: unknown[] = [];
    const decide = async (messages: readonly { readonly content: unknown }[], labels: readonly string[]) => {
      asked.push(messages.at(-1)?.content, labels);
      return { options: [{ probability: 0.25 }, { probability: 0.75 }] };
    };
    const { prompt } = ROUTER;
    await ask(
      client({ router: routerOf(false, false, { prompt }) }, { device: Object.assign(device, { decide }) }),
    );
    expect(asked).toEqual([expect.stringMatching(/^Recite\.\n\nCan you answer/), ["Yes", "No"]]);
    expect(records[0]?.knowledge?.sure).toBeCloseTo(Math.log(1 / 3));
  });

  test("a device that fails or says nothing of a prompt is asked for the answer nevertheless", async () => {
    device.hasLogprobs = false;
    const made = client({ router: routerOf(true, true) });
    expect(codes(await ask(made))).toEqual(["preferred"]);
    device.hasLogprobs = true;
    device.stallAfter = 0;
    const slow = client({ router: routerOf(true, true), timeouts: { device_first_token: 0.05 } });
    expect((await ask(slow)).x_nearfar.route).toBe("cloud");
  });

  test("does not stand beside a difficulty", () => {
    const options = { difficulty: () => 0.5 };
    expect(() => client({ router: ROUTER }, options)).toThrow("give one of policy.router and difficulty");
  });

  test("records what it would look at, and decides nothing", async () => {
    expect(codes(await ask(client({ router: "record", shadow: "device" })))).toEqual(["preferred"]);
    expect(records).toMatchObject([
      {
        knowledge: {
          top: [-0.1, -4],
          row: [
            [0, -5],
            [1, -5.3333],
            [2, -5.6667],
          ],
        },
        outcome: { first_tokens: { length: 16 }, path: ["device"] },
      },
    ]);
  });
});

describe("the prompt that was read for a decision", () => {
  test("is held until the answer has begun", async () => {
    const made = client({ router: routerOf(false, false) });
    await ask(made, { max_tokens: 3 });
    expect(device.heldAt).toEqual([1, 0, 0]);
    for await (const _ of await made.chat.completions.create({ messages: MESSAGES, stream: true })) break;
    expect(device.held).toBe(0);
  });

  test("is released where the answer fails, is aborted, or goes elsewhere", async () => {
    const easy = client({ router: routerOf(false, false) });
    device.failAfter = 0;
    expect((await ask(easy)).x_nearfar.path).toEqual(["cloud"]);
    expect(device.held).toBe(0);
    device.failAfter = Number.POSITIVE_INFINITY;
    device.stallAfter = 1;
    device.delay = 30;
    const controller = new AbortController();
    const left = ask(easy, { signal: controller.signal });
    setTimeout(() => controller.abort(new Error("enough")), 15);
    await expect(left).rejects.toThrow("enough");
    expect(device.held).toBe(0);
    expect((await ask(client({ router: routerOf(true, false) }))).x_nearfar.route).toBe("cloud");
    const nowhere = client({ router: routerOf(false, false) }, { cloud: null });
    device.delay = 0;
    const many = { messages: MESSAGES, max_tokens: 5000 };
    await expect(ask(nowhere, many)).rejects.toMatchObject({ name: "RouteError" });
    expect(device.read).toHaveLength(4);
  });
});

describe("an answer that the router doubts after its first tokens", () => {
  test("is not shown, and the cloud begins again", async () => {
    const made = client({ router: routerOf(false, true) });
    for (const stream of [false, true]) {
      const parts: string[] = [];
      let path: unknown = null;
      if (stream)
        for await (const { choices, x_nearfar } of await made.chat.completions.create({
          messages: MESSAGES,
          stream: true,
        })) {
          parts.push(choices[0]?.delta.content ?? "");
          path = x_nearfar?.path ?? path;
        }
      else {
        const answer = await ask(made);
        parts.push(answer.choices[0]?.message.content ?? "");
        path = answer.x_nearfar.path;
        expect(codes(answer)).toEqual(["easy", "doubtful"]);
      }
      expect([parts.join(""), path]).toEqual([TEXT, ["cloud"]]);
    }
    expect(cloud.requests).toHaveLength(2);
    expect(records).toMatchObject([{ outcome: { first_tokens: { length: ROUTER.tokens } } }, {}]);
  });
});

describe("a short answer", () => {
  test("is judged at its end, before it is shown", async () => {
    const request = { max_tokens: 2 };
    const doubted = await ask(client({ router: routerOf(false, true) }), request);
    expect([doubted.x_nearfar.path, codes(doubted)]).toEqual([["cloud"], ["easy", "doubtful"]]);
    const trusted = await ask(client({ router: routerOf(false, false) }), request);
    expect([trusted.x_nearfar.path, codes(trusted)]).toEqual([["device"], ["easy"]]);
  });
});

describe("privacy and budgets win over a router that sends everything to the cloud", () => {
  test.each([
    [{}, PRIVATE, ["private"], false],
    [{ budget_day: 1 }, {}, ["hard", "budget_day"], true],
    [{ budget_conversation: 1 }, { x_nearfar: { conversation: "c" } }, ["hard", "budget_conversation"], true],
    [{ mode: "device_only" } as const, {}, ["mode"], false],
  ])("%j %j", async (policy, request, expected, degraded) => {
    const answer = await ask(client({ ...policy, router: routerOf(true, true) }), request);
    expect(answer.x_nearfar).toMatchObject({ route: "device", path: ["device"], degraded });
    expect(codes(answer)).toEqual(expected);
    expect(cloud.connections).toBe(0);
  });

  test("a private prompt is not read for it, and its beginning is not recorded", async () => {
    await ask(client({ router: routerOf(true, true) }), PRIVATE);
    expect(device.requests).toHaveLength(1);
    expect(records).toMatchObject([{ outcome: { first_tokens: null } }]);
    expect(records[0]).not.toHaveProperty("knowledge");
  });

  test("an easy prompt that is doubted stays where the cloud may not be paid", async () => {
    const answer = await ask(client({ router: routerOf(false, true), budget_day: 1 }));
    expect(answer.choices[0]?.message.content).toBe(TEXT);
    expect([answer.x_nearfar.path, codes(answer)]).toEqual([["device"], ["easy", "budget_day"]]);
    expect(cloud.connections).toBe(0);
  });
});
