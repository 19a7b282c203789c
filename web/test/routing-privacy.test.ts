/** The privacy contract: private texts stay on the device, in every part. Python passes the same cases. */

import { readFileSync } from "node:fs";
import type { AddressInfo } from "node:net";
import { createServer, type Server } from "node:net";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import {
  type Chunk,
  type Completion,
  type DecisionRecord,
  HybridClient,
  type HybridRequest,
  type KeptState,
  type Message,
  NearfarError,
  type PolicyOptions,
} from "../src/routing/index.js";
import { PrivateTexts } from "../src/routing/privacy.js";
import { FakeDevice } from "./support/sides.js";

const LONG = "Dear diary, the word for my account is quokka, and nobody may know it.";
const SHORT = "pin quokka";
// The secret has only letters, because digits occur in ids and times by chance.
const SECRET = "quokka";
const CASES = new URL("../../tests/vectors/routing/privacy.json", import.meta.url);
const QUIET: PolicyOptions = { mode: "prefer_cloud", retry: { attempts: 0 }, timeouts: { connect: 5 } };

interface Turn {
  readonly expect: "device" | "refused" | "failed";
  readonly content?: string;
  readonly parts?: string;
  readonly before?: string;
  readonly system?: string;
  readonly carry?: boolean;
  readonly message?: object;
  readonly device?: string;
  readonly policy?: PolicyOptions;
  readonly leave?: boolean;
  readonly restart?: boolean;
  readonly stream?: boolean;
}

interface Case {
  readonly name: string;
  readonly device?: string;
  readonly policy?: PolicyOptions;
  readonly touched?: boolean;
  readonly turns: readonly Turn[];
}

const text = readFileSync(CASES, "utf8")
  .replaceAll("LONG", JSON.stringify(LONG).slice(1, -1))
  .replaceAll("SHORT", SHORT);

/** A cloud that never answers, and records connections. */
let cloud: Server;
let touched: number;

beforeEach(async () => {
  touched = 0;
  cloud = createServer((socket) => {
    touched += 1;
    socket.destroy();
  });
  await new Promise<void>((resolve) => cloud.listen(0, "127.0.0.1", resolve));
});
afterEach(() => new Promise((resolve) => cloud.close(resolve)));

function merged(...policies: readonly (PolicyOptions | undefined)[]): PolicyOptions {
  const made: Record<string, unknown> = {};
  for (const policy of policies)
    for (const [name, value] of Object.entries(policy ?? {}))
      made[name] =
        typeof value === "object" && value !== null ? { ...(made[name] as object), ...value } : value;
  return made;
}

function deviceThat(how: string): FakeDevice | null {
  if (how === "absent") return null;
  const device = new FakeDevice();
  device.countTokens = (messages) => Promise.resolve(Math.ceil(JSON.stringify(messages).length / 4));
  if (how === "lost") device.failAfter = 0;
  if (how === "cut") device.failAfter = 4;
  if (how === "stalls") device.stallAfter = 0;
  if (how === "slow") device.delay = 20;
  if (how === "unsure") device.unsureFrom = 0;
  device.lostMessage = `lost, in the middle of: ${LONG}`;
  return device;
}

function messagesOf(
  { carry, system, before, parts, content, message }: Turn,
  last: readonly Message[],
): Message[] {
  const made: Message[] = carry ? [...last] : [];
  if (system !== undefined) made.push({ role: "system", content: system });
  if (before !== undefined)
    made.push({ role: "user", content: before }, { role: "assistant", content: "Hi." });
  const said = parts === undefined ? (content ?? "") : [{ type: "text", text: parts }];
  return [...made, { role: "user", content: said, ...message }];
}

async function answered(client: HybridClient, messages: readonly Message[], turn: Turn): Promise<string> {
  const {
    expect: _,
    content,
    parts,
    before,
    system,
    carry,
    message,
    device,
    policy,
    leave,
    restart,
    ...asked
  } = turn;
  const { stream = false, ...fields } = asked;
  const request: HybridRequest = { messages, max_tokens: 8, temperature: 0, ...fields };
  if (!stream) {
    const whole = await client.chat.completions.create({ ...request, stream: false });
    expect(whole.x_nearfar.path).toEqual(["device"]);
    return whole.choices[0]?.message.content ?? "";
  }
  const chunks: Chunk[] = [];
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
    chunks.push(chunk);
    if (leave && chunk.choices[0]?.delta.content) break;
  }
  return chunks.map(({ choices }) => choices[0]?.delta.content ?? "").join("");
}

/** Whether a request of the case is private only because of an earlier request's text. */
function earlier({ touched, turns }: Case): boolean {
  const unsaid = turns.filter((turn) => !JSON.stringify(turn).includes('"private":true'));
  return !touched && unsaid.some((turn) => turn.expect !== "refused");
}

test.each((JSON.parse(text) as Case[]).map((item) => [item.name, item] as const))("%s", async (_, item) => {
  const kept: KeptState[] = [];
  const said: string[] = [];
  const records: DecisionRecord[] = [];
  const make = (policy: PolicyOptions): HybridClient =>
    new HybridClient({
      device: deviceThat(item.device ?? "ok"),
      cloud: { baseURL: `http://127.0.0.1:${(cloud.address() as AddressInfo).port}` },
      hints: { read: () => ({ online: true, battery: null, charging: null, metered: null }) },
      store: { read: () => kept.at(-1) ?? null, write: (state) => void kept.push(state) },
      onRecord: (record) => void records.push(record),
      policy,
    });
  let client = make(merged(QUIET, item.policy));
  let messages: Message[] = [];
  for (const turn of item.turns) {
    const policy = merged(QUIET, item.policy, turn.policy);
    if (turn.restart) client = make(policy);
    else if (turn.policy) client.setPolicy(policy);
    if (turn.device) client.device = deviceThat(turn.device);
    messages = messagesOf(turn, messages);
    const answer = answered(client, messages, turn);
    if (turn.expect === "device") messages = [...messages, { role: "assistant", content: await answer }];
    else {
      const error: unknown = await answer.then(
        () => null,
        (reason: unknown) => reason,
      );
      expect(error, "it should have failed").toBeInstanceOf(NearfarError);
      said.push(String(error), String((error as Error).cause));
    }
  }
  said.push(...records.map((record) => JSON.stringify(record)));
  const unsaid = records.some(({ private_by }) => private_by === "earlier" || private_by === "quote");
  expect(unsaid || item.touched).toBe(earlier(item) || item.touched);
  for (const { private_by, request } of records) expect(private_by !== null).toBe(request.private);
  expect(touched > 0).toBe(item.touched ?? false);
  if (!item.touched) expect([...said, JSON.stringify(kept)].join("\n")).not.toContain(SECRET);
});

interface Quotation {
  readonly name: string;
  readonly private: readonly Message[];
  readonly request: readonly Message[];
  readonly params?: object;
  readonly found: "earlier" | "quote" | null;
}

const QUOTES = JSON.parse(
  readFileSync(new URL("../../tests/vectors/routing/quotes.json", import.meta.url), "utf8"),
) as Quotation[];

test.each(QUOTES.map((item) => [item.name, item] as const))("quotation: %s", (_, item) => {
  const texts = new PrivateTexts();
  texts.remember(texts.marks({ messages: item.private, ...item.params }), null);
  const again = new PrivateTexts(JSON.parse(JSON.stringify(texts.record())));
  for (const each of [texts, again])
    expect(each.known(each.marks({ messages: item.request, ...item.params }), null)).toBe(item.found);
});

test("a state of the old form brings its conversations", () => {
  const texts = new PrivateTexts(["a"]);
  const hello = texts.marks({ messages: [{ role: "user", content: "Hello" }] });
  expect(texts.known(hello, "a")).toBe("earlier");
  expect(texts.known(hello, "b")).toBeNull();
});

describe("a request under way whose conversation becomes private", () => {
  const begun = (device: FakeDevice, policy: PolicyOptions): HybridClient =>
    new HybridClient({
      device,
      cloud: { baseURL: `http://127.0.0.1:${(cloud.address() as AddressInfo).port}` },
      hints: { read: () => ({ online: true, battery: null, charging: null, metered: null }) },
      policy: merged(QUIET, { mode: "prefer_device" }, policy),
    });
  const messages = [{ role: "user", content: "Hello" }];
  const secret: HybridRequest = {
    messages: [{ role: "user", content: LONG }],
    max_tokens: 1,
    x_nearfar: { private: true, conversation: "a" },
  };
  const unsure = { monitor: { logprob: -0.001, window: 2, min_tokens: 2 } };

  test.each([
    ["the device is lost", { failAfter: 6 }, {}],
    ["the model is unsure, and would continue", { unsureFrom: 6 }, { ...unsure, escalation: "continue" }],
    ["the model is unsure of a whole answer", { unsureFrom: 6 }, { ...unsure, escalation: "restart" }],
  ] as const)("%s", async (_, faults, policy) => {
    const device = Object.assign(new FakeDevice(), faults);
    const client = begun(device, policy);
    const stream = await client.chat.completions.create({
      messages,
      max_tokens: 20,
      stream: true,
      x_nearfar: { conversation: "a" },
    });
    let seen = 0;
    try {
      for await (const _chunk of stream) if (seen++ === 0) await client.chat.completions.create(secret);
    } catch (error) {
      expect(String(error)).toContain("lost");
    }
    expect(seen).toBeGreaterThan(0);
    expect(touched).toBe(0);
  });

  test("hedging", async () => {
    const device = Object.assign(new FakeDevice(), { delay: 60 });
    const client = begun(device, { hedge_seconds: 0.02 });
    const asked = client.chat.completions.create({
      messages,
      max_tokens: 3,
      x_nearfar: { conversation: "a" },
    });
    const [answer] = await Promise.all([asked, client.chat.completions.create(secret)]);
    expect((answer as Completion).x_nearfar.path).toEqual(["device"]);
    expect(touched).toBe(0);
  });

  test("decided for the cloud, and not sent yet", async () => {
    const client = begun(new FakeDevice(), { mode: "prefer_cloud" });
    const asked = client.chat.completions.create({
      messages,
      max_tokens: 3,
      x_nearfar: { conversation: "a" },
    });
    const [answer] = await Promise.all([asked, client.chat.completions.create(secret)]);
    expect((answer as Completion).x_nearfar.path).toEqual(["device"]);
    expect(touched).toBe(0);
  });
});
