import { readFileSync } from "node:fs";
import fc from "fast-check";
import { expect, test } from "vitest";
import type { FunctionTool } from "../../src/protocol/openai.js";
import { type AnswerFormat, readAnswerFormat } from "../../src/worker/answers/format.js";
import { AnswerReader } from "../../src/worker/answers/reader.js";
import { effort } from "./effort.js";

/** The reader of answers with any text, as tests/unit/test_call_streams.py tests it in Python. */
const { formats, tools } = JSON.parse(
  readFileSync(new URL("../../../tests/vectors/tools/reading.json", import.meta.url), "utf8"),
) as { formats: Record<string, unknown>; tools: FunctionTool[] };
const FORMATS = Object.entries(formats).map(([name, form]) => [name, readAnswerFormat(form, name)] as const);

type Said = [kind: string, text: string];

/** Fragments, with neighbours of the same kind joined. */
function read(form: AnswerFormat, pieces: readonly string[], cut = false): Said[] {
  const reader = new AnswerReader(form, { tools });
  const made: Said[] = [];
  for (const { kind, text } of [...pieces.flatMap((piece) => reader.push(piece)), ...reader.finish(cut)]) {
    const last = made.at(-1);
    if (last?.[0] === kind && ["text", "reasoning", "arguments"].includes(kind)) last[1] += text;
    else made.push([kind, text]);
  }
  return made;
}

function apart(text: string, places: readonly number[]): string[] {
  const ends = [...new Set([0, text.length, ...places.map((place) => Math.min(place, text.length))])];
  ends.sort((a, b) => a - b);
  return ends.slice(1).map((end, at) => text.slice(ends[at], end));
}

function marksOf({ reasoning, calls, text, dropped }: AnswerFormat): string[] {
  const named = calls?.named;
  const found = [reasoning?.begin, reasoning?.end, text, ...dropped, calls?.begin, calls?.end, calls?.bare];
  return [...found, ...(calls?.also ?? []), named?.before, named?.after, named?.until].filter(
    (mark): mark is string => !!mark,
  );
}

const MARKS = [...new Set(FORMATS.flatMap(([, form]) => marksOf(form)))];
const ODD = [...'[],}{\n"\\ ', "{}", '{"a": "\\"}', '{"city": "\\u00f8 ', "weather", "none", '"name":', "x("];
const CALLS = [
  '{"name": "time", "arguments": {}}',
  '{"name": "weather", "parameters": ',
  '{"name": "a\n", "arg',
];

const hostile = (form: AnswerFormat): fc.Arbitrary<string> => {
  const marks = marksOf(form);
  const halves = marks.map((mark) => mark.slice(0, mark.length / 2));
  const part = fc.oneof(fc.constantFrom(...marks, ...halves, ...ODD, ...CALLS), fc.string({ maxLength: 3 }));
  return fc.array(part, { maxLength: 14 }).map((parts) => parts.join(""));
};

test("any text is read the same wherever it is cut", () => {
  const cases = fc
    .constantFrom(...FORMATS.map(([, form]) => form))
    .chain((form) => fc.tuple(fc.constant(form), hostile(form)));
  const places = fc.array(fc.integer({ min: 1, max: 99 }));
  fc.assert(
    fc.property(cases, places, fc.boolean(), ([form, text], ends, cut) => {
      const whole = read(form, [text], cut);
      expect(read(form, apart(text, ends), cut)).toEqual(whole);
      expect(read(form, text.split(""), cut)).toEqual(whole);
    }),
    effort(1000),
  );
});

const STRING = fc
  .array(
    fc.oneof(
      fc.constantFrom(...MARKS, "\\", '"', "}", "{", "]"),
      fc.string({ maxLength: 4, unit: "grapheme" }),
    ),
    {
      maxLength: 4,
    },
  )
  .map((parts) => parts.join(""));
const { value: VALUE } = fc.letrec((tie) => ({
  value: fc.oneof(
    { maxDepth: 3 },
    STRING,
    fc.double(),
    fc.boolean(),
    fc.array(tie("value"), { maxLength: 3 }),
    fc.dictionary(STRING, tie("value"), { maxKeys: 3 }),
  ),
}));
const GIVEN = fc.dictionary(STRING, VALUE, { maxKeys: 4 }).map((given) => JSON.stringify(given));
const CALL = fc.tuple(fc.constantFrom("weather", "time"), GIVEN);

function written({ calls }: AnswerFormat, name: string, given: string): string {
  if (!calls) return "";
  const { named, begin, end, blank, bare } = calls;
  const inner = named
    ? named.before + name + named.after + given
    : `{"${calls.name}": "${name}", "${calls.arguments}": ${given}}`;
  const [from, to] = bare ? ["", ""] : [begin + blank, blank + end];
  return from + (calls.listed ? `[${inner}]` : inner) + to;
}

test("arguments come to the last character, whatever marks stand in them", () => {
  const forms = FORMATS.map(([, form]) => form).filter(({ calls }) => calls && !calls.spelling);
  fc.assert(
    fc.property(
      fc.constantFrom(...forms),
      fc.array(CALL, { minLength: 1, maxLength: 3 }),
      fc.array(fc.integer({ min: 1, max: 300 })),
      (form, all, places) => {
        const calls = form.calls?.repeats ? all : all.slice(0, 1);
        const before = form.calls?.bare ? "" : "Well. ";
        const text = before + calls.map(([name, given]) => written(form, name, given)).join("");
        const expected = calls.flatMap(([name, given]): Said[] => [
          ["call", name],
          ["arguments", given],
          ["called", ""],
        ]);
        if (before) expected.unshift(["text", before]);
        expect(read(form, [text])).toEqual(expected);
        expect(read(form, apart(text, places))).toEqual(expected);
      },
    ),
    effort(500),
  );
});
