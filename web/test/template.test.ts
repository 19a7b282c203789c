/**
 * The input of a chat template, and the choice of the template for a conversation. Python's tests:
 * tests/unit/test_templates.py, tests/unit/test_chat_templates.py.
 */

import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { ArtifactError } from "../src/protocol/errors.js";
import { createTextCodec } from "../src/worker/text/index.js";
import { ChatTemplate } from "../src/worker/text/template.js";
import { findTemplates } from "../src/worker/text/tokenizer-file.js";

const SOURCE = "{{ bos_token }}{% if think %}[think {{ level }}]{% endif %}{{ messages[0]['content'] }}";

test("variables of a request reach the template and take nothing's place", () => {
  const template = new ChatTemplate(SOURCE, { bos_token: "<s>" });
  const render = (variables?: Readonly<Record<string, string | number | boolean>>): string =>
    template.render([{ role: "user", content: "Hi" }], { variables });
  expect(render()).toBe("<s>Hi");
  expect(render({ think: true, level: 3, unknown: "x" })).toBe("<s>[think 3]Hi");
  expect(render({ messages: "others", bos_token: "other", think: false })).toBe("<s>Hi");
});

interface Case {
  readonly case: string;
  readonly config?: unknown;
  readonly files?: Readonly<Record<string, string>>;
  readonly plain: string | null;
  readonly tools: string | null;
  readonly refused?: string;
}

const CASES = JSON.parse(
  readFileSync(new URL("../../tests/vectors/chat_templates.json", import.meta.url), "utf8"),
) as readonly Case[];

test.each(CASES)(
  "a conversation gets its template: $case",
  ({ config, files = {}, plain, tools, refused }) => {
    const { "chat_template.jinja": chatTemplate, "additional_chat_templates/tool_use.jinja": toolTemplate } =
      files;
    const find = () =>
      findTemplates(
        { chat_template: config },
        { ...(chatTemplate && { chatTemplate }), ...(toolTemplate && { toolTemplate }) },
      );
    if (refused !== undefined) {
      expect(find).toThrow(ArtifactError);
      expect(find).toThrow(refused);
      return;
    }
    const found = find();
    expect([found.plain, found.tools ?? found.plain]).toEqual([plain, tools]);
  },
);

test("a conversation with tools is rendered by their template", () => {
  const tokenizerJson = {
    ...{
      version: "1.0",
      normalizer: null,
      pre_tokenizer: null,
      post_processor: null,
      decoder: { type: "Fuse" },
    },
    added_tokens: [],
    model: {
      type: "BPE",
      vocab: { a: 0 },
      merges: [],
      unk_token: null,
      byte_fallback: false,
      fuse_unk: false,
    },
  };
  const files = {
    tokenizerJson,
    tokenizerConfig: {},
    chatTemplate: "plain",
    toolTemplate: "{{ tools | length }}",
  };
  const codec = createTextCodec(files, { bosTokenId: null, eosTokenIds: [] });
  const tools = [{ type: "function", function: { name: "f" } }] as const;
  expect([codec.render([], { tools }), codec.render([], { tools: [] }), codec.render([])]).toEqual([
    "1",
    "plain",
    "plain",
  ]);
});
