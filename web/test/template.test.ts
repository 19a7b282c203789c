/** What a chat template is given. Python's half: tests/unit/test_templates.py. */

import { expect, test } from "vitest";
import { ChatTemplate } from "../src/worker/text/template.js";

const SOURCE = "{{ bos_token }}{% if think %}[think {{ level }}]{% endif %}{{ messages[0]['content'] }}";

test("variables of a request reach the template and take nothing's place", () => {
  const template = new ChatTemplate(SOURCE, { bos_token: "<s>" });
  const render = (variables?: Readonly<Record<string, string | number | boolean>>): string =>
    template.render([{ role: "user", content: "Hi" }], { variables });
  expect(render()).toBe("<s>Hi");
  expect(render({ think: true, level: 3, unknown: "x" })).toBe("<s>[think 3]Hi");
  expect(render({ messages: "others", bos_token: "other", think: false })).toBe("<s>Hi");
});
