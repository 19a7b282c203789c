/** Grammars in their own worker, as in nearfar/node: texts that they accept and reject, and how they end. */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Worker } from "node:worker_threads";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { GRAMMARS, type GrammarPort } from "../src/grammar/words.js";
import { grammarOf } from "../src/page/formats.js";
import type { Grammar } from "../src/protocol/grammar.js";
import type { StartGrammars } from "../src/worker/host.js";
import { follow } from "../src/worker/parts/follow.js";
import { Grammars } from "../src/worker/session/grammars.js";
import { builtPackage } from "./support/built.js";

/** Texts that every engine accepts and rejects; the Python engine and the server replay the same vectors. */
interface Vector {
  readonly name: string;
  readonly format: object;
  readonly accepts?: readonly string[];
  readonly refuses?: readonly string[];
  readonly error?: string;
}

const vectors = JSON.parse(
  readFileSync(new URL("../../tests/vectors/grammars.json", import.meta.url), "utf8"),
) as Vector[];
const END = 256;
/** A grammar whose compilation had not ended after 45 s. */
const HOSTILE: Grammar = { kind: "regex", text: "(([a-z]{0,300}){0,300}){0,10}" };
let folder = "";
let started = 0;

function start(): GrammarPort {
  started += 1;
  const worker = new Worker(join(folder, "worker.js"), { workerData: GRAMMARS });
  return {
    post: (word) => worker.postMessage(word),
    listen: (onWord) => void worker.on("message", onWord),
    end: () => void worker.terminate(),
  };
}

/** Starts grammars as nearfar/here does, without workers. */
const startHere = async () => follow;

/** Grammars over a vocabulary with a token for each byte, and an end token. */
function bytes(limitMs?: number, ends: readonly number[] = [END], begin: StartGrammars = start): Grammars {
  return new Grammars(begin, { size: 257, bytesOf: (token) => Uint8Array.of(token), ends }, limitMs);
}

beforeAll(async () => {
  folder = join((await builtPackage()).folder, "dist/node");
}, 180_000);

function allows(words: Uint32Array, token: number): boolean {
  return ((words[token >> 5] ?? 0) >>> (token & 31)) % 2 === 1;
}

async function takes(grammars: Grammars, grammar: Grammar, text: string): Promise<boolean> {
  const way = await grammars.follow(grammar);
  let allowed: Uint32Array | null = way.allowed;
  for (const byte of new TextEncoder().encode(text)) {
    if (!allowed || !allows(allowed, byte)) return false;
    allowed = await way.accept(byte);
  }
  way.close();
  return allowed === null || allows(allowed, END);
}

describe.each([
  { place: "in a worker", begin: start as StartGrammars },
  { place: "in the engine's thread", begin: startHere },
])("a grammar $place takes and refuses what the other engines do", { timeout: 240_000 }, ({ begin }) => {
  let grammars: Grammars;
  beforeAll(() => {
    grammars = bytes(240_000, [END], begin);
  });
  afterAll(() => grammars.end());
  for (const { name, format, accepts = [], refuses = [], error } of vectors)
    test(name, async () => {
      const asked = async (): Promise<Grammar> => grammarOf(format) as Grammar;
      if (error !== undefined)
        return expect(asked().then((made) => grammars.follow(made))).rejects.toThrow(error);
      const made = await asked();
      for (const text of accepts) expect([text, await takes(grammars, made, text)]).toEqual([text, true]);
      for (const text of refuses) expect([text, await takes(grammars, made, text)]).toEqual([text, false]);
    });
});

test("following in the engine's thread leaves its console as it is", async () => {
  // biome-ignore-start lint/suspicious/noConsole: this is about the console
  const { error } = console;
  const grammars = bytes(60_000, [END], startHere);
  await grammars.follow({ kind: "json_object", text: "" });
  expect(console.error).toBe(error);
  // biome-ignore-end lint/suspicious/noConsole: this is about the console
  await grammars.end();
}, 180_000);

describe("a worker that fails", { timeout: 60_000 }, () => {
  const schema: Grammar = { kind: "json_schema", text: '{"enum": ["abc"]}' };
  const code = (text: string): number => text.charCodeAt(0);

  test("takes too long: its grammar is refused, and answers under way go on in another", async () => {
    const grammars = bytes();
    const way = await grammars.follow(schema);
    await way.accept(code('"'));
    const quick = bytes(300);
    await quick.follow({ kind: "json_object", text: "" }).catch(() => undefined);
    await expect(quick.follow(HOSTILE)).rejects.toMatchObject({
      message: expect.stringContaining("took longer than 0.3 s"),
      param: "response_format",
    });
    await quick.end();
    await grammars.end();
    const before = started;
    expect(allows((await way.accept(code("a"))) ?? new Uint32Array(9), code("b"))).toBe(true);
    expect(started).toBe(before + 1);
    await grammars.end();
  });

  test("compiles what nobody waits for: it is ended, and keeps no other request waiting", async () => {
    // Compiling it takes longer than this test may.
    const grammars = bytes(600_000);
    const way = await grammars.follow(schema);
    for (const when of ["while it compiles", "before its turn"]) {
      const left = new AbortController();
      const hostile = [grammars.follow(HOSTILE, left.signal), grammars.follow(HOSTILE, left.signal)];
      if (when === "while it compiles") await new Promise((resolve) => setTimeout(resolve, 300));
      left.abort(new Error("left"));
      for (const one of hostile) await expect(one).rejects.toThrow("left");
      expect(await takes(grammars, schema, '"abc"')).toBe(true);
    }
    const allowed = await way.accept(code('"'));
    expect(allows(allowed ?? new Uint32Array(9), code("a"))).toBe(true);
    await grammars.end();
  }, 30_000);

  test("is at an answer that ends as it should: it is not ended for that", async () => {
    const grammars = bytes();
    const way = await grammars.follow(schema);
    const next = way.accept(code('"'));
    way.close();
    await next;
    const before = started;
    expect(await takes(grammars, schema, '"abc"')).toBe(true);
    expect(started).toBe(before);
    await grammars.end();
  });

  test("has a library that aborts: it says why, and the next request has another worker", async () => {
    const grammars = bytes();
    const missing: Grammar = { kind: "ebnf", text: 'root ::= "a" c' };
    await expect(grammars.follow(missing)).rejects.toThrow('Rule "c" is not defined');
    const before = started;
    expect(await takes(grammars, schema, '"abc"')).toBe(true);
    expect(started).toBe(before + 1);
    await grammars.end();
  });

  test("does not start: the reason, with a code", async () => {
    const port = (): GrammarPort => {
      const worker = new Worker(join(folder, "nothing.js"), { workerData: GRAMMARS });
      return {
        post: (word) => worker.postMessage(word),
        listen: (onWord) =>
          void worker.on("error", (error) =>
            onWord({ type: "failed", message: String(error), code: "unreachable" }),
          ),
        end: () => void worker.terminate(),
      };
    };
    const none = new Grammars(port, { size: 257, bytesOf: () => null, ends: [END] });
    await expect(none.follow(schema)).rejects.toMatchObject({
      code: "unreachable",
      message: expect.stringContaining("nothing.js"),
    });
  });
});

test("an answer ends where nothing can follow, and not before, whatever the model's end tokens", async () => {
  for (const ends of [[END], []]) {
    const grammars = bytes(60_000, ends);
    const way = await grammars.follow({ kind: "json_schema", text: '{"enum": ["a"]}' });
    const answers = [];
    for (const char of '"a"') answers.push(await way.accept(char.charCodeAt(0)));
    expect(answers.map((answer) => answer === null)).toEqual([false, false, true]);
    await grammars.end();
  }
}, 180_000);

test("ignore_eos: a grammar that may go on does, and one that may not ends", async () => {
  for (const ends of [[END], []]) {
    const grammars = bytes(60_000, ends);
    const endless = await grammars.follow({ kind: "regex", text: "a*" }, undefined, true);
    const after = await endless.accept("a".charCodeAt(0));
    for (const allowed of [endless.allowed, after])
      expect(
        allowed && Array.from({ length: 257 }, (_, token) => token).filter((at) => allows(allowed, at)),
      ).toEqual(["a".charCodeAt(0)]);
    const short = await grammars.follow({ kind: "regex", text: "a?" }, undefined, true);
    expect(await short.accept("a".charCodeAt(0))).toBe(null);
    await grammars.end();
  }
}, 180_000);

test("a structural tag's schemas are narrowed, and its blanks are bounded", async () => {
  const grammars = bytes(60_000);
  const tag = (json_schema: object): Grammar => ({
    kind: "structural_tag",
    text: JSON.stringify({
      format: { type: "tag", begin: "<a>", content: { type: "json_schema", json_schema }, end: "</a>" },
    }),
  });
  await expect(grammars.follow(tag({ not: {} }))).rejects.toThrow("'not'");
  const made = tag({ type: "object", properties: { n: { type: "integer" } }, required: ["n"] });
  expect(await takes(grammars, made, '<a>{"n": 1}</a>')).toBe(true);
  expect(await takes(grammars, made, `<a>{${" ".repeat(17)}"n": 1}</a>`)).toBe(false);
  await grammars.end();
}, 180_000);
