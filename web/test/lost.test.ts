/** An engine whose worker dies, hangs or loses its device, and the errors that a program gets. */

import { afterEach, describe, expect, test, vi } from "vitest";
import { type Engine, openEngine } from "../src/page/client.js";
import type { EngineOptions } from "../src/page/options.js";
import { DeviceError, toErrorRecord } from "../src/protocol/errors.js";
import type { FromWorker, ToWorker } from "../src/protocol/messages.js";
import type { WorkerPort } from "../src/protocol/ports.js";
import { CARD as SAMPLE, STATS } from "./support/card.js";

const CARD = { ...SAMPLE, contextLength: 100 };

/** The worker's side: it loads at once, and answers with the number of messages that it was given. */
class LineWorker implements WorkerPort {
  readonly got: ToWorker[] = [];
  terminated = false;
  /** Sends nothing any more, like a worker in an endless loop. */
  hangs = false;
  /** Is alive, but never finishes a request. */
  busy = false;
  readonly #hear: ((event: { readonly data: FromWorker }) => void)[] = [];
  readonly #fail: ((event: { readonly message: string }) => void)[] = [];
  readonly #garbled: (() => void)[] = [];

  postMessage(message: ToWorker): void {
    const copy = structuredClone(message);
    this.got.push(copy);
    if (this.hangs || this.terminated) return;
    if (copy.type === "ping") this.say({ type: "pong" });
    if (copy.type === "dispose") this.say({ type: "disposed", stats: null });
    if (this.busy) return;
    if (copy.type === "load") this.say({ type: "loaded", card: CARD });
    if (copy.type === "count" && copy.prompt.kind === "chat")
      this.say({ type: "counted", id: copy.id, tokens: 20 * copy.prompt.messages.length });
    if (copy.type !== "generate") return;
    const { id, request } = copy;
    const count = request.prompt.kind === "chat" ? request.prompt.messages.length : 0;
    this.say({ type: "answer", id, answer: { event: "accepted" } });
    this.say({ type: "answer", id, answer: { event: "finish", index: 0, text: `${count}`, reason: "stop" } });
    this.say({ type: "answer", id, answer: { event: "end", stats: STATS } });
  }

  addEventListener(type: "message" | "error" | "messageerror", listener: (event: never) => void): void {
    ({ message: this.#hear, error: this.#fail, messageerror: this.#garbled })[type].push(listener as never);
  }

  terminate(): void {
    this.terminated = true;
  }

  say(data: FromWorker): void {
    for (const hear of this.#hear) hear({ data });
  }

  /** One of its messages cannot be read. */
  garble(): void {
    for (const garbled of this.#garbled) garbled();
  }

  die(message: string): void {
    for (const fail of this.#fail) fail({ message });
  }
}

const URL_ = new URL("http://localhost/model/");
const TURN = [
  { role: "user", content: "one" },
  { role: "assistant", content: "two" },
] as const;
const LAST = { role: "user", content: "and?" } as const;

async function engineOf(
  options: EngineOptions = {},
  prepare: (worker: LineWorker) => void = () => undefined,
): Promise<{ engine: Engine; workers: LineWorker[] }> {
  const workers: LineWorker[] = [];
  const start = (): LineWorker => {
    const worker = new LineWorker();
    prepare(worker);
    workers.push(worker);
    return worker;
  };
  return { engine: await openEngine(start, URL_, options), workers };
}

async function ask(engine: Engine, messages: readonly { role: string; content: string }[] = [LAST]) {
  const reply = await engine.chat.completions.create({ messages: messages as never });
  return { text: reply.choices[0]?.message.content, usage: reply.usage };
}

const pending = Symbol("pending");
/** Waits until all pending callbacks have run. */
const soon = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));
const now = <T>(promise: Promise<T>): Promise<T | typeof pending> =>
  Promise.race([promise, soon().then((): typeof pending => pending)]);

afterEach(() => vi.useRealTimers());

describe("engine.lost", () => {
  test("settles where the worker dies, and what is awaited ends by the same name", async () => {
    const { engine, workers } = await engineOf();
    expect(await now(engine.lost)).toBe(pending);
    const [worker] = workers;
    if (worker) worker.busy = true;
    const answer = expect(ask(engine)).rejects.toMatchObject({ code: "worker-failed" });
    await soon();
    worker?.die("out of stack");
    await answer;
    const reason = await engine.lost;
    expect(reason).toMatchObject({ code: "worker-failed", name: "DeviceError" });
    expect(reason.message).toContain("out of stack");
    await expect(ask(engine)).rejects.toMatchObject({ code: "worker-failed" });
  });

  test("settles where a message of the worker cannot be read: the answer that it had would never come", async () => {
    const { engine, workers } = await engineOf();
    const [worker] = workers;
    if (worker) worker.busy = true;
    const answer = expect(ask(engine)).rejects.toMatchObject({ code: "worker-failed" });
    await soon();
    worker?.garble();
    await answer;
    expect((await engine.lost).message).toContain("one of its messages cannot be read");
  });

  test("settles where the device could not be opened again, with that reason", async () => {
    const { engine, workers } = await engineOf();
    const error = new DeviceError("no GPU", { code: "no-adapter" });
    workers[0]?.say({ type: "lost", error: toErrorRecord(error) });
    expect(await engine.lost).toMatchObject({ code: "no-adapter", message: "no GPU" });
  });

  test("does not settle by dispose", async () => {
    const { engine } = await engineOf();
    await engine.dispose();
    expect(await now(engine.lost)).toBe(pending);
    await expect(ask(engine)).rejects.toMatchObject({ code: "disposed" });
  });
});

describe("engine.reload", () => {
  test("takes a dead engine to life, and its conversation goes on", async () => {
    const { engine, workers } = await engineOf({ kvMemory: 1234 });
    const { create } = engine.chat.completions;
    expect(create).toBeTypeOf("function");
    workers[0]?.die("gone");
    const first = engine.lost;
    await Promise.all([engine.reload(), engine.reload()]);
    expect(workers).toHaveLength(2);
    expect(workers[0]?.terminated).toBe(true);
    expect(workers[1]?.got[0]).toMatchObject({ type: "load", settings: { kvMemory: 1234 } });
    expect((await ask(engine, [...TURN, LAST])).text).toBe("3");
    expect(engine.lost).not.toBe(first);
    expect(await now(engine.lost)).toBe(pending);
  });

  test("ends what a living worker was at by name, and takes its place", async () => {
    const { engine, workers } = await engineOf();
    const [worker] = workers;
    if (worker) worker.busy = true;
    const answer = expect(ask(engine)).rejects.toMatchObject({ code: "device-lost" });
    await soon();
    await engine.reload();
    await answer;
    expect((await ask(engine)).text).toBe("1");
  });

  test("that is aborted rejects with the reason, and can be called again", async () => {
    const { engine } = await engineOf();
    const reason = new Error("no time");
    await expect(engine.reload({ signal: AbortSignal.abort(reason) })).rejects.toBe(reason);
    await engine.reload();
    expect((await ask(engine)).text).toBe("1");
  });

  test("of a disposed engine is refused", async () => {
    const { engine } = await engineOf();
    await engine.dispose();
    await expect(engine.reload()).rejects.toMatchObject({ code: "disposed" });
  });
});

describe("what is known of the model", () => {
  test("follows what the worker goes on with", async () => {
    const { engine, workers } = await engineOf();
    workers[0]?.say({ type: "card", card: { ...CARD, contextLength: 50, largestStep: 16 } });
    expect(engine.model).toMatchObject({ contextLength: 50, largestStep: 16 });
  });
});

describe("an abort", () => {
  const reasons = [new Error("mine"), new DOMException("late", "TimeoutError"), "a word"];

  test.each(reasons)("of a load rejects with its reason: %s", async (reason) => {
    const controller = new AbortController();
    const loading = engineOf({ signal: controller.signal }, (worker) => {
      worker.busy = true;
    });
    setImmediate(() => controller.abort(reason));
    await expect(loading).rejects.toBe(reason);
    await expect(engineOf({ signal: AbortSignal.abort(reason) })).rejects.toBe(reason);
  });

  test.each(reasons)("of an answer rejects with its reason, streamed or not: %s", async (reason) => {
    const { engine, workers } = await engineOf();
    for (const worker of workers) worker.busy = true;
    for (const stream of [false, true]) {
      const controller = new AbortController();
      const { signal } = controller;
      const answer = engine.chat.completions.create({ messages: [LAST], stream, signal });
      setImmediate(() => controller.abort(reason));
      await expect(answer).rejects.toBe(reason);
    }
  });
});

describe("a worker that says nothing", () => {
  const patience = 8;

  test("is noticed while it answers", async () => {
    vi.useFakeTimers({ toFake: ["setInterval", "clearInterval"] });
    const { engine, workers } = await engineOf({ patience });
    const [worker] = workers;
    if (worker) worker.hangs = true;
    const answer = expect(ask(engine)).rejects.toMatchObject({ code: "worker-failed" });
    await soon();
    vi.advanceTimersByTime(1000 * patience);
    expect(worker?.terminated).toBe(false);
    vi.advanceTimersByTime(1000);
    await answer;
    expect(worker?.terminated).toBe(true);
    expect((await engine.lost).message).toContain("nothing for 8 s");
    expect(worker?.got.filter(({ type }) => type === "ping")).toHaveLength(1);
    await engine.reload();
    expect((await ask(engine)).text).toBe("1");
  });

  test("is noticed while it loads", async () => {
    vi.useFakeTimers({ toFake: ["setInterval", "clearInterval"] });
    const loading = engineOf({ patience }, (worker) => {
      worker.hangs = true;
    });
    const refused = expect(loading).rejects.toMatchObject({ code: "worker-failed" });
    await soon();
    vi.advanceTimersByTime(1000 * (patience + 1));
    await refused;
  });

  test("is left alone where it only takes long, or where nothing is awaited", async () => {
    vi.useFakeTimers({ toFake: ["setInterval", "clearInterval"] });
    const { engine, workers } = await engineOf({ patience });
    vi.advanceTimersByTime(100_000 * patience);
    const [worker] = workers;
    expect(worker?.got.filter(({ type }) => type === "ping")).toHaveLength(0);
    if (worker) worker.busy = true;
    const answer = ask(engine);
    await soon();
    vi.advanceTimersByTime(100_000 * patience);
    expect(await now(answer)).toBe(pending);
    expect(worker?.terminated).toBe(false);
    expect(vi.getTimerCount()).toBe(1);
    answer.catch(() => undefined);
    await engine.dispose();
    expect(vi.getTimerCount()).toBe(0);
  });
});

describe("options that mean nothing", () => {
  test.each([
    ["contextLenght", 5],
    ["kvMemory", "64MB"],
    ["kvMemory", () => 5],
    ["threads", "all"],
    ["onProgress", "yes"],
    ["patience", 0],
    ["contextPolicy", "drop"],
  ])("are refused by name: %s", async (name, value) => {
    await expect(engineOf({ [name]: value })).rejects.toMatchObject({ name: "RequestError", param: name });
  });

  test("are refused of a profile too", async () => {
    const { engine } = await engineOf();
    await expect(engine.profile({ rows: (() => 1) as never })).rejects.toMatchObject({ param: "rows" });
  });

  test("and what a framework has wrapped can be sent", async () => {
    const { engine, workers } = await engineOf();
    const stop = new Proxy(["x"], {});
    const logit_bias = new Proxy({ 5: 1 }, {});
    await engine.chat.completions.create({ messages: new Proxy([LAST], {}), stop, logit_bias });
    const sent = workers[0]?.got.find((message) => message.type === "generate");
    expect(sent).toMatchObject({ request: { options: { stop: ["x"], logit_bias: { 5: 1 } } } });
  });
});

describe("a conversation that outgrows its context", () => {
  // A message has 20 tokens; the prompt may have 75 of 100.
  const system = { role: "system", content: "Be brief." } as const;
  const long = [system, ...TURN, ...TURN, LAST];

  test("loses its oldest turns where that is asked for, and says how much", async () => {
    const { engine } = await engineOf({ contextPolicy: "truncate-oldest" });
    const { text, usage } = await ask(engine, long);
    expect(text, "the system prompt and the question").toBe("2");
    expect(usage.prompt_tokens_details.left_out_messages).toBe(4);
    const short = await ask(engine, [system, ...TURN.slice(0, 1)]);
    expect(short.usage.prompt_tokens_details).toEqual({ cached_tokens: 0 });
  });

  test("stays whole by default, and where one request says so", async () => {
    expect((await ask((await engineOf()).engine, long)).text).toBe("6");
    const { engine } = await engineOf({ contextPolicy: "truncate-oldest" });
    const reply = await engine.chat.completions.create({ messages: long, context_policy: "error" });
    expect(reply.choices[0]?.message.content).toBe("6");
  });

  test("leaves room for the answer that is asked for", async () => {
    const { engine } = await engineOf();
    const asked = { messages: long, context_policy: "truncate-oldest" } as const;
    const kept = async (max_tokens: number): Promise<string | null | undefined> =>
      (await engine.chat.completions.create({ ...asked, max_tokens })).choices[0]?.message.content;
    expect([await kept(10), await kept(40), await kept(10_000)]).toEqual(["4", "2", "2"]);
  });

  test("becomes what a function makes of it", async () => {
    const { engine } = await engineOf();
    const reply = await engine.chat.completions.create({
      messages: long,
      context_policy: async ({ messages, tokens, limit, contextLength, countTokens }) => {
        expect([messages.length, tokens, limit, contextLength]).toEqual([6, 120, 75, 100]);
        expect(await countTokens(messages.slice(1))).toBe(100);
        return [{ role: "user", content: "In short: one two. And?" }];
      },
    });
    expect(reply.choices[0]?.message.content).toBe("1");
    expect(reply.usage.prompt_tokens_details.left_out_messages).toBe(5);
    const broken = engine.chat.completions.create({ messages: long, context_policy: () => [] });
    await expect(broken).rejects.toMatchObject({ param: "messages" });
  });
});
