/** Schemas of tools' arguments; tests/unit/test_tool_parameters.py has the same tests. */

import { expect, test } from "vitest";
import { mayBeObject } from "../src/protocol/parameters.js";
import { argumentSchema } from "../src/worker/answers/parameters.js";

test("a chain of references is followed to a bound", () => {
  const defined: Record<string, object> = { d1200: { type: "object" } };
  for (let at = 0; at < 1200; at++) defined[`d${at}`] = { $ref: `#/$defs/d${at + 1}` };
  const schema = { $ref: "#/$defs/d0", $defs: defined };
  expect(mayBeObject(schema, schema)).toBe(true);
  expect(argumentSchema(schema)).toMatchObject({ type: "object" });
});

test.each([{ required: ["city"] }, { additionalProperties: false }, { properties: { a: {} } }])(
  "%j beside a reference is kept",
  (beside) => {
    const plain = { $ref: "#/$defs/A", $defs: { A: { type: "object", properties: { city: {} } } } };
    expect(argumentSchema({ ...plain, ...beside })).toEqual({ ...plain, ...beside, type: "object" });
    expect(argumentSchema(plain)).toMatchObject({ properties: { city: {} } });
  },
);

test("ways that are none demand nothing", () => {
  for (const schema of [{ anyOf: [] }, { oneOf: [] }, { enum: "a" }])
    expect(mayBeObject(schema, schema)).toBe(true);
});
