/** Answers with a response_format in Chromium, where the worker starts another worker for the grammar. */

import { describe, expect, test } from "vitest";
import type { Engine } from "../../src/page/index.js";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage } from "../support/engine-page.js";
import { toyArtifact } from "../support/toy-artifact.js";

declare global {
  var engine: Engine;
  var ask: (more: object) => Promise<unknown>;
}

const CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}";
const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", minLength: 1, maxLength: 8 },
    legs: { type: "integer", minimum: 0, maximum: 8 },
    kind: { enum: ["cat", "dog"] },
  },
  required: ["name", "legs", "kind"],
};

describe.skipIf(!CHROMIUM)("an answer with a format in Chromium", { timeout: 180_000 }, () => {
  const at = enginePage();

  test("is JSON of its schema, beside answers of free text", async () => {
    at.artifact = toyArtifact({ chatTemplate: CHAT });
    const { free, ...made } = await at.page.evaluate(async (schema) => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const ask = (content: string, more: object) =>
        engine.chat.completions.create({
          messages: [{ role: "user", content }],
          max_tokens: 200,
          temperature: 0,
          ...more,
        });
      const json_schema = { name: "pet", schema };
      const text = async (content: string, more: object) => (await ask(content, more)).choices[0];
      const alone = await text("free", { max_tokens: 30 });
      const [first, second, beside, number] = await Promise.all([
        text("a", { response_format: { type: "json_schema", json_schema } }),
        text("b", { response_format: { type: "json_schema", json_schema } }),
        text("free", { max_tokens: 30 }),
        text("c", { response_format: { type: "regex", regex: "[0-9]{3}-[0-9]{4}" } }),
      ]);
      const continued = await engine.completions.create({
        ...{
          prompt: "d",
          max_tokens: 9,
          temperature: 0,
          response_format: { type: "regex", regex: "[0-9]{5}" },
        },
      });
      const features = engine.model.features;
      await engine.dispose();
      return {
        first,
        second,
        number,
        continued,
        features,
        free: [alone?.message.content, beside?.message.content],
      };
    }, SCHEMA);
    expect(free[1]).toBe(free[0]);
    expect(made.features).toContain("json_schema");
    expect(made.number?.message.content).toMatch(/^\d{3}-\d{4}$/);
    expect(made.continued.choices[0]?.text).toMatch(/^\d{5}$/);
    for (const choice of [made.first, made.second]) {
      expect(choice?.finish_reason).toBe("stop");
      const { name, legs, kind } = JSON.parse(choice?.message.content ?? "");
      expect([
        name.length > 0 && name.length <= 8,
        legs >= 0 && legs <= 8,
        SCHEMA.properties.kind.enum,
      ]).toEqual([true, true, expect.arrayContaining([kind])]);
    }
  });

  test("that nobody waits for any more holds up no other, though its grammar takes for ever", async () => {
    at.artifact = toyArtifact({ chatTemplate: CHAT });
    const made = await at.page.evaluate(async () => {
      const engine = await nearfarPackage.createEngine("/toy/");
      const ask = async (regex: string, signal?: AbortSignal) => {
        const response_format = { type: "regex" as const, regex };
        const messages = [{ role: "user" as const, content: "a" }];
        const request = { messages, response_format, max_tokens: 20, ...(signal && { signal }) };
        return (await engine.chat.completions.create(request)).choices[0]?.message.content;
      };
      await ask("[0-9]{3}");
      const began = performance.now();
      const leave = async () => {
        const left = new AbortController();
        const asked = ask("(([a-z]{0,300}){0,300}){0,10}", left.signal);
        await engine.stats();
        await new Promise((resolve) => setTimeout(resolve, 300));
        left.abort(new Error("left"));
        return asked.then(
          () => "answered",
          ({ message }) => message,
        );
      };
      const told = [await leave(), await leave(), await leave(), await leave(), await ask("[0-9]{4}")];
      const took = performance.now() - began;
      await engine.dispose();
      return { told, took };
    });
    expect(made.told).toEqual([...Array(4).fill("left"), expect.stringMatching(/^\d{4}$/)]);
    // The time limit would have ended each of them after ten seconds.
    expect(made.took).toBeLessThan(35_000);
  });

  /** Results of a request with a format, of one without, and of the former again after a call of `mend`. */
  async function failures(mend: () => void): Promise<readonly unknown[]> {
    at.artifact = toyArtifact({ chatTemplate: CHAT });
    await at.page.evaluate(async () => {
      globalThis.engine = await nearfarPackage.createEngine("/toy/");
      globalThis.ask = async (more) => {
        const asked = { messages: [{ role: "user" as const, content: "a" }], max_tokens: 20, temperature: 0 };
        try {
          const { choices } = await engine.chat.completions.create({ ...asked, ...more });
          return choices[0]?.message.content ?? null;
        } catch (error) {
          const { name, code, message } = error as { name: string; code: string; message: string };
          return { name, code, message };
        }
      };
    });
    const both = () =>
      at.page.evaluate(async () => [
        await ask({ response_format: { type: "regex", regex: "[0-9]{3}" } }),
        typeof (await ask({})),
      ]);
    const first = await both();
    mend();
    return [...first, ...(await both())];
  }

  test("whose code cannot be loaded is refused by a code, others are answered, later it is too", async () => {
    at.server.intercept = (path, response) => {
      if (!/chunks\/(grammar|lib)-/.test(path)) return false;
      response.writeHead(404).end();
      return true;
    };
    const told = await failures(() => {
      at.server.intercept = () => false;
    });
    expect(told).toMatchObject([
      { name: "RequestError", code: "unreachable", message: expect.stringContaining("cannot be loaded") },
      "string",
      expect.stringMatching(/^\d{3}$/),
      "string",
    ]);
  });

  test.each([
    { how: "throws", code: `throw new Error("a fault of the test");` },
    { how: "rejects", code: "await Promise.reject(new Error('a fault of the test'));" },
  ])("whose worker $how as it starts is refused at once, and others are answered", async ({ code }) => {
    at.artifact = toyArtifact({ chatTemplate: CHAT });
    const told = await at.page.evaluate(async (fault) => {
      const from = new URL("dist/worker.js", location.href).href;
      const source = `import "${from}"; if (self.name === "nearfar grammars") { ${fault} }`;
      const blob = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
      const engine = await nearfarPackage.createEngine("/toy/", {
        worker: () => new Worker(blob, { type: "module", name: "nearfar" }),
      });
      const ask = async (more: object) => {
        const asked = { messages: [{ role: "user" as const, content: "a" }], max_tokens: 20 };
        try {
          return typeof (await engine.chat.completions.create({ ...asked, ...more }));
        } catch (error) {
          const { name, code, message } = error as { name: string; code: string; message: string };
          return { name, code, message };
        }
      };
      const format = { response_format: { type: "regex", regex: "[0-9]{3}" } };
      const all = [await ask(format), await ask({}), await ask(format), await ask({})];
      await engine.dispose();
      return all;
    }, code);
    const refused = {
      name: "RequestError",
      code: "unsupported",
      message: expect.stringContaining("a fault of the test"),
    };
    expect(told).toMatchObject([refused, "object", refused, "object"]);
  });

  test("is refused by a code where the policy forbids WebAssembly", async () => {
    at.server.intercept = (path, response) => {
      if (path === "dist/worker.js") response.setHeader("content-security-policy", "script-src 'self'");
      return false;
    };
    const told = await failures(() => undefined);
    const refused = {
      name: "RequestError",
      code: "unsupported",
      message: expect.stringContaining("'wasm-unsafe-eval' in script-src"),
    };
    expect(told).toMatchObject([refused, "string", refused, "string"]);
  });
});
