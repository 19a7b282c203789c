import fc from "fast-check";
import { expect, test } from "vitest";
import { ArtifactError, NearfarError, RequestError } from "../../src/protocol/errors.js";
import type { ChatMessage } from "../../src/protocol/openai.js";
import { createTextCodec } from "../../src/worker/text/codec.js";
import { ChatTemplate } from "../../src/worker/text/template.js";
import type { TextCodec } from "../../src/worker/text/types.js";
import { toyArtifact } from "../support/toy-artifact.js";
import { effort } from "./effort.js";

type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

const SPECIAL = { bosTokenId: 0, eosTokenIds: [96] };
const TOKENIZER = JSON.parse(
  new TextDecoder().decode(toyArtifact().files.get("tokenizer/tokenizer.json")),
) as Json;
/** Parts of tokenizer files, so that wrong ones are nearly right. */
const STEPS: Json[] = [
  { type: "ByteLevel", add_prefix_space: true, trim_offsets: true, use_regex: true },
  { type: "Metaspace", replacement: "▁", prepend_scheme: "always", split: true },
  {
    type: "Sequence",
    pretokenizers: [{ type: "Digits", individual_digits: true }],
    decoders: [{ type: "Fuse" }],
  },
  { type: "Replace", pattern: { String: "▁" }, content: " " },
  { type: "Strip", content: " ", start: 1, stop: 0 },
  { type: "ByteFallback" },
];

/** Every place in a JSON value, as a path. */
function placesIn(value: Json, path: (string | number)[] = []): (string | number)[][] {
  if (typeof value !== "object" || value === null) return [path];
  return [path, ...Object.entries(value).flatMap(([key, item]) => placesIn(item, [...path, key]))];
}

function replaced(value: Json, [key, ...rest]: (string | number)[], by: Json): Json {
  if (key === undefined || typeof value !== "object" || value === null) return by;
  if (Array.isArray(value))
    return value.map((item, i) => (String(i) === String(key) ? replaced(item, rest, by) : item));
  return { ...value, [key]: replaced(value[key] ?? null, rest, by) };
}

const PLACES = placesIn(TOKENIZER).filter(
  (path) => path[0] !== "model" || path[1] !== "vocab" || path.length < 4,
);
const scrap = fc.oneof(fc.jsonValue({ maxDepth: 2 }) as fc.Arbitrary<Json>, fc.constantFrom(...STEPS));
const tokenizers = fc
  .array(fc.tuple(fc.constantFrom(...PLACES, ["decoder"], ["pre_tokenizer"], ["normalizer"]), scrap), {
    minLength: 1,
    maxLength: 3,
  })
  .map((changes) => changes.reduce((value, [path, by]) => replaced(value, path, by), TOKENIZER));

/** Uses a codec for everything that a model's text needs. */
function use(codec: TextCodec, text: string): void {
  const ids = codec.encode(text);
  for (const id of ids) expect(Number.isInteger(id)).toBe(true);
  const stream = codec.stream(["stop"], ids);
  for (const id of [...ids, 0, 5, 96, 1e6]) {
    expect(typeof stream.push(id).text).toBe("string");
    expect(typeof codec.tokenText(id)).toBe("string");
  }
  stream.flush();
}

test("a tokenizer file works, or is refused as a fault of the artifact when it is opened", () => {
  const config = fc.oneof(fc.constant({}), scrap);
  fc.assert(
    fc.property(
      tokenizers,
      config,
      fc.string({ unit: "binary", maxLength: 30 }),
      (tokenizerJson, tokenizerConfig, text) => {
        let codec: TextCodec;
        try {
          codec = createTextCodec({ tokenizerJson, tokenizerConfig }, SPECIAL) as TextCodec;
        } catch (error) {
          expect(error).toBeInstanceOf(ArtifactError);
          return;
        }
        try {
          use(codec, text);
        } catch (error) {
          expect(error).toBeInstanceOf(NearfarError);
        }
      },
    ),
    effort(300),
  );
});

const fragments = fc.constantFrom(
  "{{ messages[0].content }}",
  "{% for m in messages %}",
  "{% endfor %}",
  "{{ m.role }}",
  "{{ m['content'] | trim }}",
  "{% if add_generation_prompt %}",
  "{% endif %}",
  "{% else %}",
  "{% set x = messages | length %}",
  "{{ x + 'a' }}",
  "{{ raise_exception('no') }}",
  "{{ bos_token }}",
  "{{ undefined_thing.a.b }}",
  "{{ messages | tojson }}",
  "{%",
  "}}",
  "{#",
  "#}",
  "{{ m.content.split('a')[1:] }}",
  "{% macro f(a) %}",
  "{% endmacro %}",
  "{{ f(1) }}",
  "{{ 1 / 0 }}",
  "{{ -x }}",
  "{{ [1, 2] }}",
  "text\n",
  "{% generation %}",
  "{% endgeneration %}",
  "{{ loop.index }}",
  "{{ strftime_now('%Y') }}",
  "{{ {'a': 1}.items() }}",
  "{% break %}",
);
const sources = fc.array(fc.oneof({ weight: 5, arbitrary: fragments }, fc.string({ maxLength: 8 })), {
  maxLength: 8,
});
const messages = fc.array(
  fc.record({
    role: fc.constantFrom<ChatMessage["role"]>("system", "user", "assistant", "tool"),
    content: fc.string({ unit: "binary", maxLength: 20 }),
  }),
  { minLength: 1, maxLength: 3 },
);

test("a chat template gives text, or names itself or the messages as what is wrong", () => {
  fc.assert(
    fc.property(sources, messages, fc.boolean(), (parts, conversation, continueLast) => {
      let template: ChatTemplate;
      try {
        template = new ChatTemplate(parts.join(""), { bos_token: "<s>" });
      } catch (error) {
        expect(error).toBeInstanceOf(ArtifactError);
        return;
      }
      try {
        expect(typeof template.render(conversation, { continueLast })).toBe("string");
      } catch (error) {
        expect(error).toBeInstanceOf(RequestError);
      }
    }),
    effort(500),
  );
});
