import { expect, test } from "vitest";
import { explain } from "../chat/notice.js";
import { toolsLack } from "../chat/tools-fit.js";
import { noRoute } from "../src/routing/reasons.js";

const tooLong = noRoute([
  { code: "context", side: "device", value: 1390, limit: 1020 },
  { code: "unavailable", side: "cloud", value: "no address is set", limit: null },
]);

test("nothing is said of a cloud where there is none", () => {
  const alone = explain(tooLong, true);
  expect(alone).toMatchObject({
    title: "This is too long for the model",
    text: "1390 tokens do not fit the context of 1020.",
    steps: [expect.stringMatching(/new chat/), expect.stringMatching(/tools/)],
  });
  const lost = noRoute([{ code: "breaker_open", side: "device", value: 5, limit: null }]);
  expect(explain(lost, true).text).toBe("failed lately, tried again in 5 s.");
  expect(explain(tooLong).text).toContain("cloud: no address is set");
});

test("tools are taken back where a context is too short for them", () => {
  expect(toolsLack(300, 1024)).toBeNull();
  expect(toolsLack(1150, 1024)).toMatch(/1,024 tokens is too short for the tools.*1,150/);
});
