import { describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage } from "../support/engine-page.js";
import { HERMES, TOOLS_TEMPLATE } from "../support/parrot.js";
import { sharedPages } from "../support/shared-pages.js";
import { expectedText, toyArtifact } from "../support/toy-artifact.js";
import { parrotWasm } from "../support/toy-wasm.js";

const workerOf = (imports = "", options = ""): string => `
  import { shareEngine } from "/dist/here.js";
  ${imports}
  const shared = shareEngine(${options});
  addEventListener("connect", ({ ports: [port] }) => shared.connect(port));
  addEventListener("message", ({ data, ports: [port] }) => data === "connect" && shared.connect(port));
  // With this, service workers control the page without a reload.
  addEventListener("activate", (event) => event.waitUntil(clients.claim()));
`;

describe.skipIf(!CHROMIUM)("one model for several pages", { timeout: 120_000 }, () => {
  const at = enginePage();

  const serveWorker = (script = workerOf()): void => {
    at.server.intercept = (path, response) => {
      if (path !== "shared.js") return false;
      response.writeHead(200, { "content-type": "text/javascript" }).end(script);
      return true;
    };
  };

  const { another, open, ask, launches, shards } = sharedPages(at, "/shared.js");

  test("in a SharedWorker: loaded once, answers both, stays until the last page leaves", async () => {
    serveWorker();
    const second = await another();
    expect(await Promise.all([open(at.page), open(second)])).toEqual(["toy", "toy"]);
    expect(shards()).toBe(3);
    expect(await Promise.all([ask(at.page, "q"), ask(second, "z")])).toEqual([
      expectedText("q", 9),
      expectedText("z", 9),
    ]);
    expect(await launches(second)).toBe(await launches(at.page));
    await at.page.evaluate(() => globalThis.shared.dispose());
    expect(await ask(second, "b")).toBe(expectedText("b", 9));
    const third = await another();
    expect(await open(third, "/other/")).toMatch(/RequestError.*is shared, and has .*\/toy\//);
    await at.page.close();
    expect(await open(third)).toBe("toy");
    expect(await ask(third, "c")).toBe(expectedText("c", 9));
    expect(shards()).toBe(3);
  });

  test("an answer that is left is not computed to its end for the others to wait", async () => {
    serveWorker();
    const second = await another();
    await open(at.page);
    await open(second);
    const left = await at.page.evaluate(async () => {
      const stream = await globalThis.shared.completions.create({
        ...{ prompt: "q", max_tokens: 200, temperature: 0, stream: true as const },
      });
      let pieces = 0;
      for await (const _ of stream) if (++pieces === 3) break;
      return pieces;
    });
    expect(left).toBe(3);
    expect(await ask(second, "z")).toBe(expectedText("z", 9));
  });

  test("in a SharedWorker: formats and tools, of which one that aborts spoils none", async () => {
    at.artifact = await parrotWasm(TOOLS_TEMPLATE, { answers: HERMES });
    serveWorker();
    await open(at.page);
    const told = await at.page.evaluate(async () => {
      const engine = globalThis.shared;
      const ask = (more: object) =>
        engine.chat.completions
          .create({
            messages: [{ role: "user", content: "^Hello~" }],
            max_tokens: 30,
            temperature: 0,
            ...more,
          })
          .then(
            ({ choices }) => choices[0]?.message.content ?? null,
            ({ code, message }) => [code, message],
          );
      const regex = { response_format: { type: "regex", regex: "[0-9]{3}" } };
      const broken = { response_format: { type: "grammar", grammar: 'root ::= "a" c' } };
      const answers = [await ask(regex), await ask(broken), await ask(regex), await ask({})];
      return { features: engine.model.features, answers };
    });
    expect(told.features).toEqual(expect.arrayContaining(["json_schema", "tools"]));
    expect(told.answers).toEqual([
      expect.stringMatching(/^[0-9]{3}$/),
      ["invalid-request", expect.stringContaining('Rule "c" is not defined')],
      expect.stringMatching(/^[0-9]{3}$/),
      "Hello",
    ]);
    expect(at.server.requests.filter((path) => path === "dist/grammars.js").length).toBe(1);
  });

  const inServiceWorker = (): Promise<unknown> =>
    at.page.evaluate(async () => {
      await navigator.serviceWorker.register("/shared.js", { type: "module" });
      const { active } = await navigator.serviceWorker.ready;
      const engine = await nearfarPackage.createEngine("/toy/", {
        worker: () => {
          const { port1, port2 } = new MessageChannel();
          active?.postMessage("connect", [port2]);
          return nearfarPackage.sharedEngine(port1);
        },
      });
      const base = { max_tokens: 30, temperature: 0 };
      const { choices } = await engine.completions.create({ ...base, prompt: "q", max_tokens: 9 });
      const messages = [{ role: "user" as const, content: "a" }];
      const response_format = { type: "regex" as const, regex: "[0-9]{3}" };
      const number = await engine.chat.completions.create({ ...base, messages, response_format }).then(
        ({ choices: [choice] }) => choice?.message.content,
        ({ code, param, message }) => [code, param, message],
      );
      await engine.dispose();
      return [choices[0]?.text, number, engine.model.features.includes("json_schema")];
    });

  test("in a SharedWorker that dies: every call ends by a code, and reload starts another", async () => {
    serveWorker(`${workerOf()}
      addEventListener("connect", ({ ports: [port] }) =>
        port.addEventListener("message", ({ data }) => data === "die" && close()));`);
    const told = await at.page.evaluate(async () => {
      const port = (): MessagePort => new SharedWorker("/shared.js", { type: "module" }).port;
      const worker = (): nearfar.WorkerPort => nearfarPackage.sharedEngine(port());
      const engine = await nearfarPackage.createEngine("/toy/", { worker, patience: 4 });
      const ask = { prompt: "q", max_tokens: 9, temperature: 0 };
      port().postMessage("die");
      const codeOf = (call: Promise<unknown>): Promise<string> =>
        call.then(
          () => "answered",
          (error: { readonly code: string }) => error.code,
        );
      const all = (): Promise<string[]> =>
        Promise.all([
          codeOf(engine.completions.create({ ...ask, max_tokens: 200 })),
          codeOf(engine.stats()),
          codeOf(engine.countTokens([{ role: "user", content: "q" }])),
          codeOf(engine.profile()),
        ]);
      const during = await all();
      const began = performance.now();
      const after = await all();
      const waited = performance.now() - began;
      await engine.reload();
      const answer = await engine.completions.create(ask);
      await engine.dispose();
      return { during, after, atOnce: waited < 3000, text: answer.choices[0]?.text };
    });
    const failed = Array.from({ length: 4 }, () => "worker-failed");
    expect(told).toEqual({ during: failed, after: failed, atOnce: true, text: expectedText("q", 9) });
  });

  test("in a service worker, where a format is refused by name", async () => {
    at.artifact = toyArtifact({ chatTemplate: "{{ messages[0].content }}" });
    serveWorker();
    expect(await inServiceWorker()).toEqual([
      expectedText("q", 9),
      ["unsupported", "response_format", expect.stringContaining("nearfar/here/grammars")],
      false,
    ]);
  });

  test("in a service worker that imports what follows grammars: a format", async () => {
    at.artifact = toyArtifact({ chatTemplate: "{{ messages[0].content }}" });
    serveWorker(workerOf('import { grammars } from "/dist/grammars.js";', "{ grammars }"));
    expect(await inServiceWorker()).toEqual([expectedText("q", 9), expect.stringMatching(/^\d{3}$/), true]);
  });
});
