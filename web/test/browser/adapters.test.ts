import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { type Browser, chromium, type Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type * as openaiEntry from "../../src/openai-fetch/index.js";
import type * as nearfar from "../../src/page/index.js";
import type * as promptApi from "../../src/prompt-api/index.js";
import type { useNearfar } from "../../src/react/index.js";
import { builtPackage, distFile } from "../support/built.js";
import { CHROMIUM } from "../support/chromium.js";
import { type StaticServer, serve } from "../support/serve.js";
import { promptOf, question, TEMPLATE, textAfter } from "../support/toy-chat.js";
import { toyWasm } from "../support/toy-wasm.js";

/** The built entries in Chromium, with the real React and the real openai package, over real workers. */
const PEERS = `
  import React from "react";
  export default React;
  export const { createElement, StrictMode, useCallback, useEffect, useInsertionEffect, useRef, useState } =
    React;
  export { createRoot } from "react-dom/client";
  export { default as OpenAI } from "openai";`;

interface Peers {
  createElement: typeof import("react").createElement;
  StrictMode: typeof import("react").StrictMode;
  createRoot: typeof import("react-dom/client").createRoot;
  OpenAI: typeof import("openai").default;
}

interface Entries {
  nearfar: typeof nearfar;
  openai: typeof openaiEntry;
  promptApi: typeof promptApi;
  react: { useNearfar: typeof useNearfar };
  peers: Peers;
}

declare global {
  var entries: Entries;
  var unmountApp: () => void;
}

describe.skipIf(!CHROMIUM)("the adapters in Chromium", { timeout: 180_000 }, () => {
  let browser: Browser;
  let server: StaticServer;
  let page: Page;

  beforeAll(async () => {
    await builtPackage();
    const { files } = await toyWasm(TEMPLATE);
    const { outputFiles } = await build({
      stdin: { contents: PEERS, resolveDir: fileURLToPath(new URL("../..", import.meta.url)) },
      define: { "process.env.NODE_ENV": '"development"' },
      bundle: true,
      format: "esm",
      write: false,
    });
    server = await serve(async (path) => {
      if (path === "peers.js") return outputFiles[0]?.contents ?? null;
      if (path.startsWith("toy/")) return files.get(path.slice("toy/".length)) ?? null;
      return distFile(path);
    });
    browser = await chromium.launch({ executablePath: CHROMIUM ?? "", args: ["--no-sandbox"] });
    page = await browser.newPage();
    const failed = new Promise<never>((_, reject) => page.on("pageerror", reject));
    await page.goto(server.url.href);
    await page.addScriptTag({
      type: "importmap",
      content: JSON.stringify({ imports: { react: "/peers.js" } }),
    });
    const content = `
      import * as nearfar from "/dist/index.js";
      import * as openai from "/dist/openai.js";
      import * as promptApi from "/dist/prompt-api.js";
      import * as react from "/dist/react.js";
      import * as peers from "/peers.js";
      globalThis.entries = { nearfar, openai, promptApi, react, peers };`;
    await page.addScriptTag({ type: "module", content });
    await Promise.race([page.waitForFunction(() => "entries" in globalThis), failed]);
  }, 180_000);
  afterAll(async () => {
    server?.close();
    await browser?.close();
  });

  const content = question(20);
  const answer = textAfter(promptOf([{ role: "user", content }]), 20);

  test("useNearfar in StrictMode: one load, one worker, none when it is gone", async () => {
    server.requests.length = 0;
    await page.evaluate((asked) => {
      const { react, peers } = globalThis.entries;
      const { createElement, createRoot, StrictMode } = peers;
      const App = () => {
        const { status, chat } = react.useNearfar("/toy/", { request: { temperature: 0, max_tokens: 20 } });
        const said = chat.messages.at(-1)?.content;
        const onClick = (): void => void chat.send(asked);
        const button = createElement("button", { onClick }, "send");
        return createElement(
          "div",
          null,
          createElement("i", null, status),
          button,
          createElement("p", null, said),
        );
      };
      const root = createRoot(document.body.appendChild(document.createElement("main")));
      root.render(createElement(StrictMode, null, createElement(App)));
      globalThis.unmountApp = () => root.unmount();
    }, content);
    await page.waitForFunction(() => document.querySelector("i")?.textContent === "ready");
    await expect.poll(() => page.workers().length, { timeout: 30_000 }).toBe(1);
    expect(server.requests.filter((path) => path === "toy/manifest.json").length).toBe(1);
    await page.click("button");
    await page.waitForFunction((text) => document.querySelector("p")?.textContent === text, answer);
    const gone = page.workers()[0]?.waitForEvent("close");
    await page.evaluate(() => globalThis.unmountApp());
    await gone;
    expect(page.workers().length).toBe(0);
  });

  test("React's entry is for clients, as frameworks with server components want it marked", async () => {
    const entry = await readFile(join((await builtPackage()).folder, "dist/react.js"), "utf8");
    expect(entry).toMatch(/^"use client";/);
  });

  test("the Prompt API, put where the browser has no model", async () => {
    const told = await page.evaluate(async (asked) => {
      const { install } = globalThis.entries.promptApi;
      const installed = install("/toy/");
      // Chromium has a LanguageModel of its own, which has no model here.
      const LanguageModel = Reflect.get(globalThis, "LanguageModel") as promptApi.LanguageModelFactory;
      const loaded: number[] = [];
      const monitor = (target: EventTarget): void =>
        target.addEventListener("downloadprogress", (event) => {
          if (event instanceof ProgressEvent) loaded.push(event.loaded);
        });
      const session = await LanguageModel.create({ temperature: 0, monitor });
      const reader = session.promptStreaming(asked).getReader();
      let text = "";
      while (text.length < 10) text += (await reader.read()).value;
      await reader.cancel();
      const { contextWindow } = session;
      session.destroy();
      await LanguageModel.unload();
      return { installed, loaded, text: text.slice(0, 10), contextWindow };
    }, content);
    expect(told).toMatchObject({ text: answer.slice(0, 10), contextWindow: 256 });
    expect(told.installed).toBe(true);
    expect([told.loaded[0], told.loaded.at(-1)]).toEqual([0, 1]);
  });

  test("the openai package", async () => {
    const text = await page.evaluate(async (asked) => {
      const { nearfar, openai, peers } = globalThis.entries;
      const engine = await nearfar.createEngine("/toy/");
      const client = new peers.OpenAI({
        baseURL: "http://nearfar.local/v1",
        apiKey: "-",
        fetch: openai.engineFetch(engine),
        dangerouslyAllowBrowser: true,
      });
      const stream = await client.chat.completions.create({
        model: engine.model.name,
        messages: [{ role: "user", content: asked }],
        max_tokens: 20,
        temperature: 0,
        stream: true,
      });
      let said = "";
      for await (const chunk of stream) said += chunk.choices[0]?.delta.content ?? "";
      await engine.dispose();
      return said;
    }, content);
    expect(text).toBe(answer);
  });
});
