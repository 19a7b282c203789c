/** Answers with a format through popular packages, over a real engine in Node: the built nearfar/node. */

import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { generateText, jsonSchema, Output } from "ai";
import OpenAI from "openai";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { nearfar } from "../../src/ai-sdk/index.js";
import type * as node from "../../src/node/index.js";
import { engineFetch } from "../../src/openai-fetch/index.js";
import type { Engine } from "../../src/page/index.js";
import { createLanguageModel } from "../../src/prompt-api/index.js";
import { HybridClient } from "../../src/routing/index.js";
import { builtPackage } from "../support/built.js";
import type { StaticServer } from "../support/serve.js";
import { serveToyChat } from "../support/toy-chat.js";

interface Pet {
  readonly name: string;
  readonly legs: number;
}

const SCHEMA = {
  type: "object" as const,
  properties: {
    // The toy's kernels trap at some characters.
    name: { type: "string" as const, pattern: "^[a-z]{1,8}$" },
    legs: { type: "integer" as const, minimum: 0, maximum: 8 },
  },
  required: ["name", "legs"],
  additionalProperties: false,
};
const FORMAT = { type: "json_schema", json_schema: { name: "pet", schema: SCHEMA } } as const;
const ASKED = { messages: [{ role: "user" as const, content: "a pet" }], max_tokens: 120, temperature: 0 };

let built: typeof node;
let server: StaticServer;
let engine: Engine;
beforeAll(async () => {
  server = await serveToyChat();
  const entry = pathToFileURL(join((await builtPackage()).folder, "dist/node/index.js")).href;
  built = await import(/* @vite-ignore */ entry);
  engine = await built.createEngine(server.url);
}, 180_000);
afterAll(async () => {
  await engine?.dispose();
  server?.close();
});

function check(pet: Pet): void {
  expect(Object.keys(pet)).toEqual(["name", "legs"]);
  expect(pet.name).toMatch(/^[a-z]{1,8}$/);
  expect([0, 1, 2, 3, 4, 5, 6, 7, 8]).toContain(pet.legs);
}

describe("answers with a format in Node", { timeout: 60_000 }, () => {
  test("from the engine: whole, streamed, and several", async () => {
    const whole = await engine.chat.completions.create({ ...ASKED, response_format: FORMAT, n: 2 });
    for (const { finish_reason, message } of whole.choices) {
      expect(finish_reason).toBe("stop");
      check(JSON.parse(message.content ?? ""));
    }
    let text = "";
    const chunks = await engine.chat.completions.create({ ...ASKED, response_format: FORMAT, stream: true });
    for await (const { choices } of chunks) text += choices[0]?.delta.content ?? "";
    expect(text).toBe(whole.choices[0]?.message.content);
  });

  test("a schema that cannot be enforced is refused by its keyword and place", async () => {
    const schema = { type: "object", properties: { a: { type: "array", uniqueItems: true } } };
    const format = { type: "json_schema", json_schema: { name: "a", schema } } as const;
    await expect(engine.chat.completions.create({ ...ASKED, response_format: format })).rejects.toMatchObject(
      {
        name: "RequestError",
        param: "response_format",
        message: expect.stringContaining("#/properties/a: 'uniqueItems'"),
      },
    );
  });

  test("whoever leaves while a grammar is compiled waits no longer, and others are answered", async () => {
    const hostile = { type: "regex", regex: "(([a-z]{0,300}){0,300}){0,10}" } as const;
    const signal = AbortSignal.timeout(300);
    const left = engine.chat.completions.create({ ...ASKED, response_format: hostile, signal });
    await expect(left).rejects.toMatchObject({ name: "TimeoutError" });
    const free = engine.chat.completions.create({ ...ASKED, max_tokens: 5 });
    expect((await free).choices[0]?.finish_reason).toBe("length");
    const next = await engine.chat.completions.create({ ...ASKED, response_format: FORMAT });
    check(JSON.parse(next.choices[0]?.message.content ?? ""));
  });

  test("the openai package", async () => {
    const client = new OpenAI({
      baseURL: "http://nearfar.local/v1",
      apiKey: "-",
      fetch: engineFetch(engine),
      dangerouslyAllowBrowser: true,
    });
    const { choices } = await client.chat.completions.parse({
      model: "toy",
      ...ASKED,
      response_format: FORMAT,
    });
    check(choices[0]?.message.parsed as unknown as Pet);
  });

  test("the AI SDK: Output.object", async () => {
    const { output } = await generateText({
      model: nearfar(engine),
      prompt: "a pet",
      maxOutputTokens: 120,
      temperature: 0,
      output: Output.object({ schema: jsonSchema<Pet>(SCHEMA) }),
    });
    check(output);
  });

  test("the Prompt API: a schema, and a regular expression", async () => {
    const LanguageModel = createLanguageModel(() => built.createEngine(server.url));
    const session = await LanguageModel.create();
    check(JSON.parse(await session.prompt("a pet", { responseConstraint: SCHEMA })));
    const other = await LanguageModel.create();
    expect(await other.prompt("a number", { responseConstraint: /[0-9]{3}-[0-9]{2}/ })).toMatch(
      /^\d{3}-\d{2}$/,
    );
    session.destroy();
    other.destroy();
    await LanguageModel.unload();
  });

  test("the hybrid client has the device answer, which says that it can", async () => {
    const client = new HybridClient({ device: engine });
    const { choices, x_nearfar: told } = await client.chat.completions.create({
      ...ASKED,
      response_format: FORMAT,
    });
    check(JSON.parse(choices[0]?.message.content ?? ""));
    expect(told).toMatchObject({ route: "device", path: ["device"] });
  });
});
