/** Answers with tools, by the vectors that Python passes too: tests/vectors/tools. */

import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { MAX_SCHEMAS_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES } from "../src/format/constants.js";
import { checkedCalling } from "../src/page/tools.js";
import type { ChatMessage, FunctionTool, ToolChoice } from "../src/protocol/openai.js";
import { argumentsOf } from "../src/worker/answers/arguments.js";
import { answerGrammar } from "../src/worker/answers/asking.js";
import { readAnswerFormat } from "../src/worker/answers/format.js";
import { prompting } from "../src/worker/answers/prompting.js";
import { AnswerReader, type Fragment } from "../src/worker/answers/reader.js";
import { spelledArguments } from "../src/worker/answers/spelled.js";
import type { Tag } from "../src/worker/answers/tags.js";
import { checkRoles } from "../src/worker/prompts/roles.js";
import { Exact, writeExact } from "../src/worker/text/jinja/exact.js";

function vectors<T>(name: string): T {
  return JSON.parse(
    readFileSync(new URL(`../../tests/vectors/tools/${name}.json`, import.meta.url), "utf8"),
  ) as T;
}

interface Reading {
  readonly formats: Readonly<Record<string, unknown>>;
  readonly tools: readonly FunctionTool[];
  readonly cases: readonly {
    readonly name: string;
    readonly format: string;
    readonly pieces: readonly string[];
    readonly events: readonly object[];
    readonly tools?: readonly FunctionTool[];
    readonly reasoning_open?: boolean;
    readonly calls_only?: boolean;
    readonly loose?: boolean;
    readonly cut?: boolean;
    /** The fragments that each piece of text, and then the end, make certain. */
    readonly fragments?: readonly object[];
  }[];
}

interface Fill {
  readonly text: string;
  readonly bytes: number;
}

const LIMITS = vectors<{
  readonly tool: FunctionTool;
  readonly fills: readonly Fill[];
  readonly many: string;
  readonly large: string;
  readonly schemas: string;
}>("limits");

/** Fragments in the form of the vectors: neighbours of the same kind joined. */
function eventsOf(fragments: readonly Fragment[]): object[] {
  const made: Record<string, unknown>[] = [];
  let call = { name: "", arguments: "" };
  for (const { kind, text } of fragments) {
    if (kind === "call") {
      call = { name: text, arguments: "" };
      made.push({ begun: call });
    } else if (kind === "arguments") call.arguments += text;
    else if (kind === "called") {
      made.pop();
      const whole = { ...call, arguments: JSON.parse(call.arguments) as unknown };
      const last = made.at(-1);
      if (Array.isArray(last?.calls)) last.calls.push(whole);
      else made.push({ calls: [whole] });
    } else {
      const last = made.at(-1);
      if (last && kind in last) last[kind] = `${last[kind]}${text}`;
      else made.push({ [kind]: text });
    }
  }
  return made;
}

const READING = vectors<Reading>("reading");

describe("answers are taken apart wherever they are cut", () => {
  test.each(READING.cases)("$format: $name", (given) => {
    const form = readAnswerFormat(READING.formats[given.format], "answers");
    const text = given.pieces.join("");
    const halves = [...text].map((_, at) => [text.slice(0, at), text.slice(at)]);
    for (const pieces of [given.pieces, [text], [...text], ...halves]) {
      const reader = new AnswerReader(form, {
        tools: given.tools ?? READING.tools,
        reasoningOpen: given.reasoning_open ?? false,
        callsOnly: given.calls_only ?? false,
        loose: given.loose ?? false,
      });
      const made = [...pieces.map((piece) => reader.push(piece)), reader.finish(given.cut ?? false)];
      expect(eventsOf(made.flat())).toEqual(given.events);
      if (pieces !== given.pieces || !given.fragments) continue;
      const told = made.map((group) => group.map(({ kind, text: part }) => ({ [kind]: part })));
      expect(told).toEqual(given.fragments);
    }
  });
});

interface Asking {
  readonly formats: Readonly<Record<string, unknown>>;
  readonly tools: Readonly<Record<string, FunctionTool>>;
  readonly cases: readonly {
    readonly name: string;
    readonly format: string;
    readonly tools: readonly string[];
    readonly choice: ToolChoice;
    readonly parallel: boolean;
    readonly wanted: Tag | null;
    readonly reasoning_open?: boolean;
    readonly grammar?: Tag | null;
    readonly refused?: string;
  }[];
}

const ASKING = vectors<Asking>("asking");

const spelled = async () => spelledArguments;

async function grammarFor(given: Asking["cases"][number]): Promise<Tag | null> {
  const form = readAnswerFormat(ASKING.formats[given.format], "answers");
  const tools = given.tools.map((name) => ASKING.tools[name] as FunctionTool);
  const calling = checkedCalling({ tools, tool_choice: given.choice, parallel_tool_calls: given.parallel });
  const text = JSON.stringify({ type: "structural_tag", format: given.wanted });
  const wanted = given.wanted && ({ kind: "structural_tag", text } as const);
  const grammar = await answerGrammar(form, calling, wanted, given.reasoning_open ?? false, spelled);
  return grammar && (JSON.parse(grammar.text) as { format: Tag }).format;
}

describe("what an answer must match", () => {
  test.each(ASKING.cases)("$format: $name", async (given) => {
    const made = grammarFor(given);
    if (given.refused === undefined) expect(await made).toEqual(given.grammar);
    else
      await expect(made).rejects.toMatchObject({
        param: expect.stringMatching(/^tool/),
        message: expect.stringContaining(given.refused),
      });
  });
});

interface Messages {
  readonly arguments: readonly (readonly [string, object])[];
  readonly formats: Readonly<Record<string, unknown>>;
  readonly tools: Readonly<Record<string, FunctionTool>>;
  readonly cases: readonly {
    readonly name: string;
    readonly format: string;
    readonly knows_tools: boolean;
    readonly tools: readonly string[];
    readonly messages: readonly ChatMessage[];
    readonly given: readonly object[];
    readonly variables: { readonly tools?: readonly FunctionTool[] };
  }[];
}

const MESSAGES = vectors<Messages>("messages");

/** The events, with arguments of calls as JavaScript reads their JSON. */
function withoutExact(told: object): unknown {
  const text = JSON.stringify(told, (_, value) =>
    value instanceof Exact ? (JSON.parse(writeExact(value.value)) as unknown) : value,
  );
  return JSON.parse(text);
}

test.each(MESSAGES.arguments)("arguments of earlier calls: %j", (text, read) => {
  expect(withoutExact(new Exact(argumentsOf(text)))).toEqual(read);
});

describe("what a chat template gets", () => {
  test("has no message of a role that it does not know", () => {
    const messages = [{ role: "ipython", content: "x" }] as unknown as ChatMessage[];
    expect(() => checkRoles(messages, "{{ messages }} ipython")).not.toThrow();
    expect(() => checkRoles(messages, "{{ messages }}")).toThrow('knows no role "ipython"');
  });

  test.each(MESSAGES.cases)("$format: $name", (given) => {
    const { calls } = readAnswerFormat(MESSAGES.formats[given.format], "answers");
    const tools = given.tools.map((name) => MESSAGES.tools[name] as FunctionTool);
    const template = given.knows_tools ? "{{ tools }}" : "{{ messages }}";

    expect(withoutExact(prompting(given.messages, tools, calls, template))).toEqual({
      messages: given.given,
      tools: given.variables?.tools ?? [],
    });
  });
});

describe("tools take", () => {
  const checked = (tools: readonly object[]) =>
    checkedCalling({ tools: tools as FunctionTool[], tool_choice: null, parallel_tool_calls: null });
  const textOf = (count: number, { text, bytes }: Fill): string =>
    text.repeat(Math.floor(count / bytes)) + "a".repeat(count % bytes);
  const bytesOf = (value: unknown): number => JSON.stringify(value).length;
  const { type, function: named } = LIMITS.tool;

  test.each(LIMITS.fills)("a limit of bytes for %j", (fill) => {
    const room = MAX_TOOLS_BYTES - bytesOf([LIMITS.tool]);
    const filled = (count: number) => [{ type, function: { ...named, description: textOf(count, fill) } }];
    expect(checked(filled(room))?.tools).toEqual(filled(room));
    expect(() => checked(filled(room + 1))).toThrow(LIMITS.large);
  });

  test("their number in all", () => {
    const tools = Array.from({ length: MAX_TOOLS + 1 }, (_, at) => ({ type, function: { name: `f${at}` } }));
    expect(checked(tools.slice(1))?.tools).toHaveLength(MAX_TOOLS);
    expect(() => checked(tools)).toThrow(LIMITS.many);
  });

  test.each(LIMITS.fills)("a limit of bytes for schemas with %j, without annotations", async (fill) => {
    const room = MAX_SCHEMAS_BYTES - bytesOf({ type: "object", properties: { "": {} } });
    const description = "a".repeat(MAX_SCHEMAS_BYTES);
    const grammar = (count: number) => {
      const parameters = { type: "object", properties: { [textOf(count, fill)]: { description } } };
      const calling = checked([{ type, function: { ...named, parameters } }]);
      const form = readAnswerFormat(READING.formats.hermes, "answers");
      return answerGrammar(form, calling, null, false, async () => spelledArguments);
    };
    expect(await grammar(room)).not.toBeNull();
    await expect(grammar(room + 1)).rejects.toThrow(LIMITS.schemas);
  });
});
