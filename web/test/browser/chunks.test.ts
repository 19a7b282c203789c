/** Files of the built package that cannot be loaded: offline, or after a deployment with other files. */

import type { Page } from "playwright-core";
import { describe, expect, test } from "vitest";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage, importPackage } from "../support/engine-page.js";
import { toyArtifact } from "../support/toy-artifact.js";

/** Seconds that a page's engines may be silent. */
const PATIENCE = 20;
const CHUNK = /^dist\/(worker\.js|chunks\/)/;

/** A model whose calls are not JSON, so that all code for calls is loaded. */
const CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}";
const ANSWERS = {
  family: "gemma4",
  calls: {
    ...{ begin: "<|tool_call>", end: "<tool_call|>", repeats: true, named: { before: "call:" } },
    spelling: { begin: "{", end: "}", after_name: ":", separator: ",", quotes: ['<|"|>', '<|"|>'] },
  },
};

/** Actions of an app with their results: "done", the error's code, or that nothing came. */
type Told = Readonly<Record<string, string>>;

function useAll(page: Page): Promise<Told> {
  return page.evaluate(async (patience) => {
    const { createEngine, cachedModels, sharedEngine } = nearfarPackage;
    const told: Record<string, string> = {};
    const tell = async (what: string, action: () => Promise<unknown>): Promise<void> => {
      const done = action().then(
        () => "done",
        (error: { code?: string }) => error.code ?? `no code: ${error}`,
      );
      const late = new Promise<string>((resolve) => setTimeout(resolve, 1000 * patience, "nothing"));
      told[what] = await Promise.race([done, late]);
    };
    const shared = (): Promise<unknown> =>
      createEngine("/toy/", { patience, worker: () => sharedEngine() }).then((engine) => engine.dispose());
    const own = async (): Promise<void> => {
      const engine = await createEngine("/toy/", { patience });
      const messages = [{ role: "user" as const, content: "q" }];
      const asked = { messages, max_tokens: 4, temperature: 0 };
      const parameters = { type: "object", properties: { x: { type: "string" } } };
      const tools = [{ type: "function" as const, function: { name: "f", parameters } }];
      const response_format = { type: "regex" as const, regex: "[0-9]{3}" };
      await tell("answer", () => engine.chat.completions.create(asked));
      await tell("format", () => engine.chat.completions.create({ ...asked, response_format }));
      await tell("tools", () => engine.chat.completions.create({ ...asked, tools }));
      await tell("policy", () =>
        engine.chat.completions.create({ ...asked, context_policy: "truncate-oldest" }),
      );
      await tell("profile", () => engine.profile());
      await tell("embeddings", () => engine.embeddings.create({ input: "q" }));
      await engine.dispose();
    };
    await Promise.all([tell("cachedModels", cachedModels), tell("shared", shared), tell("own", own)]);
    return told;
  }, PATIENCE);
}

describe.skipIf(!CHROMIUM)("a chunk that cannot be had", { timeout: 240_000 }, () => {
  const at = enginePage();

  test("ends what needs it with a code, within the patience; the next try has it", async () => {
    at.artifact = toyArtifact({ chatTemplate: CHAT, more: { answers: ANSWERS } });
    const open = async (): Promise<Page> => {
      const page = await at.page.context().newPage();
      await page.goto(at.server.url.href);
      await importPackage(page, new URL("dist/index.js", at.server.url));
      at.server.requests.length = 0;
      return page;
    };
    const first = await open();
    const whole = await useAll(first);
    await first.close();
    expect(whole).toEqual({
      ...{ cachedModels: "done", shared: "done", own: "done" },
      ...{ answer: "done", format: "done", tools: "done", policy: "done", profile: "done" },
      embeddings: "invalid-request", // embeddings need another model
    });
    const chunks = [...new Set(at.server.requests.filter((path) => CHUNK.test(path)))];
    expect(chunks.length).toBeGreaterThan(7);
    for (const chunk of chunks) {
      const page = await open();
      at.server.intercept = (path, response) => path === chunk && !!response.writeHead(404).end();
      const failed = await useAll(page);
      at.server.intercept = () => false;
      const codes = Object.values(failed);
      expect(codes, `${chunk}: ${JSON.stringify(failed)}`).toContainEqual(
        expect.stringMatching(/^(unreachable|worker-failed)$/),
      );
      const known = /^(done|unreachable|worker-failed|unsupported|device-unsuitable|invalid-request)$/;
      for (const code of codes) expect(code, `${chunk}: ${JSON.stringify(failed)}`).toMatch(known);
      expect(await useAll(page), chunk).toEqual(whole);
      await page.close();
    }
  });
});
