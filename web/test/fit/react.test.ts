import { Window } from "happy-dom";
import { afterAll, afterEach, beforeAll, describe, expect, test, vi } from "vitest";
import { createEngine, type Engine } from "../../src/here/index.js";
import { openEngine } from "../../src/page/client.js";
import type { EngineOptions } from "../../src/page/options.js";
import type { WorkerPort } from "../../src/protocol/ports.js";
import { type Nearfar, type UseNearfarOptions, useNearfar } from "../../src/react/index.js";
import { parts } from "../../src/worker/parts/index.js";
import { serve } from "../../src/worker/session/serve.js";
import type { StaticServer } from "../support/serve.js";
import { badQuestion, promptOf, question, serveToyChat, textAfter } from "../support/toy-chat.js";

/** The hook in the real React, over an engine in this process. */
const window = new Window();
vi.stubGlobal("window", window);
vi.stubGlobal("document", window.document);
vi.stubGlobal("navigator", window.navigator);
// React looks for the window when it is imported.
const { createElement, StrictMode, useLayoutEffect } = await import("react");
const { createRoot } = await import("react-dom/client");

let server: StaticServer;
beforeAll(async () => {
  server = await serveToyChat();
});
afterAll(() => server.close());
/** Waits until a check passes, long enough for a busy machine. */
const eventually = (check: () => void | Promise<void>): Promise<void> =>
  vi.waitFor(check, { timeout: 20_000 });
const unmounts: (() => void)[] = [];
afterEach(() => {
  for (const unmount of unmounts.splice(0)) unmount();
});

interface Mounted {
  /** The hook's last result. */
  now(): Nearfar;
  readonly engines: readonly Engine[];
  readonly failures: readonly unknown[];
  readonly loads: () => number;
  render(url: string | null): void;
  unmount(): void;
}

/** Engines whose worker, in this process, can die. */
function mortalWorker() {
  const listeners: ((event: { readonly message: string }) => void)[] = [];
  const start = (): WorkerPort => {
    const { port1, port2 } = new MessageChannel();
    const hear = (listener: (event: MessageEvent) => void): void => {
      port2.onmessage = listener;
    };
    serve(
      {
        postMessage: (message) => port2.postMessage(message),
        addEventListener: (_, listener) => hear(listener),
      },
      { spawn: null, grammars: null, hardwareThreads: 1 },
      parts,
    );
    return {
      postMessage: (message) => port1.postMessage(message),
      addEventListener: (type: string, listener: (event: never) => void) => {
        if (type === "message") port1.onmessage = (event) => listener(event as never);
        else listeners.push(listener as never);
      },
      terminate: () => port1.close(),
    };
  };
  return {
    createEngine: (at: string | URL, options: EngineOptions) => openEngine(start, new URL(at), options),
    die: (message: string): void => {
      for (const listener of listeners.splice(0)) listener({ message });
    },
  };
}

/** A component with the hook, in StrictMode. */
function mount(
  url: string | null,
  options: UseNearfarOptions = {},
  onRender: (given: Nearfar) => void = () => undefined,
  onShown: (given: Nearfar) => void = () => undefined,
): Mounted {
  const engines: Engine[] = [];
  const failures: unknown[] = [];
  let loads = 0;
  let last: Nearfar | undefined;
  const create: UseNearfarOptions["createEngine"] = async (at, given) => {
    loads++;
    const engine = createEngine(at, given);
    engine.then(
      (loaded) => engines.push(loaded),
      (error) => failures.push(error),
    );
    return engine;
  };
  const App = ({ at }: { readonly at: string | null }) => {
    last = useNearfar(at, { createEngine: create, ...options });
    onRender(last);
    useLayoutEffect(() => onShown(last as Nearfar));
    return createElement("p", null, last.chat.messages.at(-1)?.content);
  };
  const root = createRoot(window.document.createElement("div") as unknown as Element);
  const render = (at: string | null): void =>
    root.render(createElement(StrictMode, null, createElement(App, { at })));
  render(url);
  unmounts.push(() => root.unmount());
  const now = (): Nearfar => last ?? expect.fail("not rendered yet");
  return { now, engines, failures, loads: () => loads, render, unmount: () => root.unmount() };
}

const until = (mounted: Mounted, status: Nearfar["status"]): Promise<void> =>
  eventually(() => expect(mounted.now().status).toBe(status));
const url = (): string => server.url.href;
const request = { temperature: 0, max_tokens: 20 };
const isDisposed = (engine: Engine | undefined): Promise<void> =>
  eventually(() =>
    expect(engine?.completions.create({ prompt: "a", max_tokens: 1 })).rejects.toThrow(/disposed/),
  );

describe("useNearfar", () => {
  test("loads once in StrictMode, tells how far it is, and disposes with the component", async () => {
    const told = new Set<string>();
    const mounted = mount(url(), {}, ({ status }) => void told.add(status));
    await until(mounted, "ready");
    expect([...told]).toEqual(["loading", "ready"]);
    await eventually(() => expect(mounted.now().progress?.phase).toBe("ready"));
    expect(mounted.loads()).toBe(1);
    expect(mounted.now().engine).toBe(mounted.engines[0]);
    mounted.unmount();
    await isDisposed(mounted.engines[0]);
  });

  test("nothing is loaded until there is an address, and another one is another model", async () => {
    const mounted = mount(null);
    await until(mounted, "idle");
    await expect(mounted.now().chat.send("a")).rejects.toThrow(/no model yet/);
    mounted.render(url());
    await until(mounted, "ready");
    mounted.render(`${url()}./`);
    await eventually(() => expect(mounted.engines.length).toBe(2));
    await until(mounted, "ready");
    await isDisposed(mounted.engines[0]);
    expect(mounted.now().engine).toBe(mounted.engines[1]);
  });

  test("a load that is left is aborted", async () => {
    // The server never answers requests for the kernels.
    server.intercept = (path) => path.endsWith(".wasm");
    const mounted = mount(url());
    await eventually(() => expect(mounted.loads()).toBe(1));
    mounted.unmount();
    await eventually(() => expect(mounted.failures).toMatchObject([{ name: "AbortError" }]));
    server.intercept = () => false;
    expect(mounted.engines).toEqual([]);
    expect(mounted.now().status).toBe("loading");
  });

  test("a model that is not there is an error", async () => {
    const mounted = mount(`${url()}nowhere/`);
    await until(mounted, "error");
    expect(mounted.now().error).toMatchObject({ name: "ArtifactError" });
  });

  test("an engine that is lost is an error", async () => {
    const worker = mortalWorker();
    const mounted = mount(url(), { createEngine: worker.createEngine });
    await until(mounted, "ready");
    worker.die("out of stack");
    await until(mounted, "error");
    expect(mounted.now().error).toMatchObject({ code: "worker-failed" });
    expect(mounted.now().engine).toBe(null);
  });

  test("an engine that is lost is loaded again, as often as is wanted, and the conversation goes on", async () => {
    const worker = mortalWorker();
    const seen: string[] = [];
    const mounted = mount(
      url(),
      { request, createEngine: worker.createEngine, reloads: 1 },
      ({ status }) => void (seen.at(-1) === status || seen.push(status)),
    );
    await until(mounted, "ready");
    const content = question(20);
    await mounted.now().chat.send(content);
    worker.die("out of stack");
    await eventually(() => expect(seen).toEqual(["loading", "ready", "loading", "ready"]));
    const [first, answer] = mounted.now().chat.messages;
    expect(first).toEqual({ role: "user", content });
    const next = question(10, [first, answer] as never);
    await mounted.now().chat.send(next);
    await eventually(() => expect(mounted.now().chat.messages).toHaveLength(4));
    worker.die("out of stack");
    await until(mounted, "error");
  });

  test("chats, and remembers", async () => {
    const mounted = mount(url(), { request, system: "Be short." });
    await until(mounted, "ready");
    const before = [{ role: "system", content: "Be short." }] as const;
    const content = question(20, before);
    await mounted.now().chat.send(content);
    const first = [
      { role: "user", content },
      { role: "assistant", content: textAfter(promptOf([...before, { role: "user", content }]), 20) },
    ] as const;
    await eventually(() => expect(mounted.now().chat.status).toBe("idle"));
    expect(mounted.now().chat.messages).toEqual(first);
    expect(mounted.now().chat.usage?.completion_tokens).toBe(20);
    const next = question(10, [...before, ...first]);
    await mounted.now().chat.send(next, { max_tokens: 10 });
    const asked = [...before, ...first, { role: "user", content: next }] as const;
    await eventually(() =>
      expect(mounted.now().chat.messages.at(-1)?.content).toBe(textAfter(promptOf(asked), 10)),
    );
    mounted.now().chat.setMessages([]);
    await eventually(() => expect(mounted.now().chat.messages).toEqual([]));
  });

  test("sends as soon as the page says ready, and the answer is whole", async () => {
    const content = question(20);
    let sent: Promise<void> | undefined;
    const onShown = ({ status, chat }: Nearfar): void => {
      if (status === "ready") sent ??= chat.send(content);
    };
    const mounted = mount(url(), { request }, undefined, onShown);
    await eventually(() => expect(sent).toBeDefined());
    await sent;
    await eventually(() => expect(mounted.now().chat.status).toBe("idle"));
    expect(mounted.now().chat.messages.at(-1)).toEqual({
      role: "assistant",
      content: textAfter(promptOf([{ role: "user", content }]), 20),
    });
  });

  test("one answer at a time, and stop keeps what there is", async () => {
    // The answer is stopped as soon as there is a piece of it.
    const onRender = ({ chat }: Nearfar): void => {
      if (chat.messages.length === 2) chat.stop();
    };
    const mounted = mount(url(), { request: { temperature: 0, max_tokens: 200 } }, onRender);
    await until(mounted, "ready");
    const { send } = mounted.now().chat;
    const content = question(200);
    const sent = send(content);
    await expect(send("more")).rejects.toThrow(/being written/);
    await sent;
    await eventually(() => expect(mounted.now().chat.status).toBe("idle"));
    const { messages, error } = mounted.now().chat;
    const whole = textAfter(promptOf([{ role: "user", content }]), 200);
    expect(error).toBe(null);
    expect(messages[1]?.content.length).toBeLessThan(whole.length);
    expect(whole.startsWith(messages[1]?.content ?? "?")).toBe(true);
  });

  test("an answer that fails is told, and the next one is answered", async () => {
    const mounted = mount(url(), { request: { temperature: 0, max_tokens: 60 } });
    await until(mounted, "ready");
    await mounted.now().chat.send(badQuestion(60));
    await eventually(() => expect(mounted.now().chat.error).toMatchObject({ name: "DeviceError" }));
    expect(mounted.now().chat.messages.at(-1)?.role).toBe("assistant");
    mounted.now().chat.setMessages([]);
    await mounted.now().chat.send(question(20), { max_tokens: 20 });
    await eventually(() => expect(mounted.now().chat).toMatchObject({ error: null, status: "idle" }));
  });
});
