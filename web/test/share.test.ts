/** One engine for several pages, whose worker dies or hangs. */

import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { WorkerLink } from "../src/page/link.js";
import { DeviceError, toErrorRecord } from "../src/protocol/errors.js";
import type { FromWorker, ModelCard, ToWorker } from "../src/protocol/messages.js";
import type { WorkerPort } from "../src/protocol/ports.js";
import { MovingPort } from "../src/shared/moving-port.js";
import { Share } from "../src/shared/share.js";

const CARD = { name: "toy", contextLength: 100, adapter: "none", features: [] } as unknown as ModelCard;
const URL_OF = new URL("http://x/toy/");

/** One end of a connection, which receives what the test sends, in the same turn of the event loop. */
class Line<In, Out> {
  readonly heard: In[] = [];
  onMessage: (message: In) => void = () => undefined;
  #listeners: ((event: { readonly data: Out }) => void)[] = [];
  postMessage = (message: In): void => {
    this.heard.push(message);
    this.onMessage(message);
  };
  addEventListener = (type: string, listener: (event: never) => void): void => {
    if (type === "message") this.#listeners.push(listener as never);
    if (type === "error") this.#errors.push(listener as never);
  };
  #errors: ((event: { readonly message: string }) => void)[] = [];
  say = (data: Out): void => {
    for (const listener of this.#listeners) listener({ data });
  };
  fail = (message: string): void => {
    for (const listener of this.#errors) listener({ message });
  };
  terminate = vi.fn();
}

/** A worker that loads at once, and answers pings while it lives. */
function worker() {
  const made = new Line<ToWorker, FromWorker>();
  const living = { value: true };
  made.onMessage = ({ type }) => {
    if (!living.value) return;
    const say = (word: FromWorker): void => queueMicrotask(() => made.say(word));
    if (type === "load") say({ type: "loaded", card: CARD });
    if (type === "ping") say({ type: "pong" });
    if (type === "dispose") say({ type: "disposed", stats: null });
  };
  const hang = (): void => {
    living.value = false;
  };
  return Object.assign(made, { hang });
}

/** A page with an engine of `share`. */
async function join(share: Share, patience = 4): Promise<WorkerLink> {
  const toShare: ((event: { readonly data: ToWorker }) => void)[] = [];
  const page = new Line<ToWorker, FromWorker>();
  page.onMessage = (data) => {
    for (const listener of toShare) listener({ data });
  };
  page.terminate = vi.fn(() => page.postMessage({ type: "dispose" }));
  const link = new WorkerLink(page as unknown as WorkerPort);
  share.connect({
    postMessage: page.say,
    addEventListener: (_, listener) => void toShare.push(listener),
  });
  await link.load(URL_OF, { patience });
  return link;
}

/** Starts one request of each kind. */
function askAll(link: WorkerLink): Promise<unknown>[] {
  const prompt = { kind: "text" as const, text: "q" };
  const answer = link.generate({ prompt, n: 1, logprobs: null, options: {} });
  const vectors = link.embed(["q"]);
  return [answer.events.take(), vectors.events.take(), link.stats(), link.count(prompt), link.profile({})];
}

/** The results: the codes of errors. */
async function codesOf(asked: readonly Promise<unknown>[]): Promise<unknown[]> {
  const all = await Promise.allSettled(asked);
  return all.map((one) => {
    if (one.status === "rejected") return (one.reason as { code: string }).code;
    return (one.value as { error?: { code: string } }).error?.code ?? one.value;
  });
}

const FAILED = Array(5).fill("worker-failed");

describe("a shared engine", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());

  test("after a loss is not the engine of a page that has not loaded what another page has loaded since", async () => {
    const workers: ReturnType<typeof worker>[] = [];
    const share = new Share(() => {
      workers.push(worker());
      return workers.at(-1) as unknown as WorkerPort;
    });
    const [first, second] = [await join(share), await join(share)];
    workers[0]?.say({ type: "lost", error: toErrorRecord(new DeviceError("the GPU is gone")) } as FromWorker);
    await second.load(new URL("http://x/other/"), { patience: 4 });
    expect(workers).toHaveLength(2);
    await expect(first.stats()).rejects.toThrow("disposed");
    expect(workers[1]?.heard.some(({ type }) => type === "stats")).toBe(false);
  });

  test("whose worker dies ends every question, refuses later ones at once, and is loaded again", async () => {
    const workers = [worker(), worker()] as const;
    const started = [...workers];
    const share = new Share(() => started.shift() as unknown as WorkerPort);
    const [first, second] = [await join(share), await join(share)];
    const underWay = [...askAll(first), ...askAll(second)];
    workers[0].fail("boom");
    expect(await codesOf(underWay)).toEqual([...FAILED, ...FAILED]);
    expect((await first.lost).message).toMatch(/worker failed: boom\..*engine\.reload\(\)/);
    expect(workers[0].terminate).toHaveBeenCalled();
    expect(await codesOf(askAll(second))).toEqual(FAILED);
    await first.close();
    const again = await join(share);
    const counted = again.count({ kind: "text", text: "q" });
    const asked = workers[1].heard.find(({ type }) => type === "count") as { id: number };
    workers[1].say({ type: "counted", id: asked.id, tokens: 7 });
    expect(await counted).toBe(7);
  });

  test("whose worker dies while it loads rejects the load", async () => {
    const made = worker();
    made.hang();
    const share = new Share(() => made as unknown as WorkerPort);
    const loading = join(share);
    made.fail("");
    await expect(loading).rejects.toMatchObject({ code: "worker-failed" });
    expect(share.isIdle).toBe(true);
  });

  test("that hangs is ended with its last page", async () => {
    const made = worker();
    const share = new Share(() => made as unknown as WorkerPort);
    const link = await join(share);
    made.hang();
    const asked = codesOf(askAll(link));
    await vi.advanceTimersByTimeAsync(6000);
    expect(await asked).toEqual(FAILED);
    await vi.advanceTimersByTimeAsync(6000);
    expect(made.terminate).toHaveBeenCalled();
  });

  test("that one page takes to hang is ended for all, if it says nothing; the next load has another", async () => {
    const workers = [worker(), worker()] as const;
    const started = [...workers];
    const share = new Share(() => started.shift() as unknown as WorkerPort);
    const [first, second] = [await join(share), await join(share, 1000)];
    workers[0].hang();
    const asked = codesOf([...askAll(first), ...askAll(second)]);
    await vi.advanceTimersByTimeAsync(5000);
    // No page gets the worker until it is known to be alive.
    const third = join(share);
    await vi.advanceTimersByTimeAsync(6000);
    expect(await asked).toEqual([...FAILED, ...FAILED]);
    expect(workers[0].terminate).toHaveBeenCalled();
    await third;
    expect(workers[1].heard[0]).toMatchObject({ type: "load" });
  });

  test("that only one page has no patience with goes on for the others", async () => {
    const made = worker();
    const share = new Share(() => made as unknown as WorkerPort);
    const patient = await join(share, 1000);
    const lines: ((event: { readonly data: ToWorker }) => void)[] = [];
    const hasty = {
      postMessage: () => undefined,
      addEventListener: (_: string, to: never) => void lines.push(to),
    };
    share.connect(hasty);
    for (const line of lines) line({ data: { type: "hangs" } });
    await vi.advanceTimersByTimeAsync(6000);
    expect(made.terminate).not.toHaveBeenCalled();
    const counted = patient.count({ kind: "text", text: "q" });
    const asked = made.heard.find(({ type }) => type === "count") as { id: number };
    made.say({ type: "counted", id: asked.id, tokens: 3 });
    expect(await counted).toBe(3);
  });

  test("asks any page whether another load was left", async () => {
    const made = worker();
    const share = new Share(() => made as unknown as WorkerPort);
    const first = await join(share);
    await join(share);
    await first.close();
    made.say({ type: "whether left", load: "old" });
    await vi.advanceTimersByTimeAsync(2000);
    expect(made.heard).toContainEqual({ type: "left", load: "old", left: false });
  });
});

test("a line to a place that cannot load the model again ends every question", async () => {
  const port = new MovingPort(
    () => undefined,
    () => undefined,
  );
  const link = new WorkerLink(port);
  const carrier = new Line<ToWorker, FromWorker>();
  port.moveTo(carrier as never, () => undefined);
  const loading = link.load(URL_OF, {});
  carrier.say({ type: "started" });
  carrier.say({ type: "loaded", card: CARD });
  await loading;
  const underWay = askAll(link);
  const error = toErrorRecord(new DeviceError("gone", { code: "worker-failed" }));
  carrier.say({ type: "failed", error });
  expect(await codesOf([...underWay, ...askAll(link)])).toEqual([...FAILED, ...FAILED]);
});
