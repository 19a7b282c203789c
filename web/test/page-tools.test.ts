import { describe, expect, test } from "vitest";
import { calculate } from "../chat/calculator.js";
import { call, OFFERED } from "../chat/tools.js";

describe("the page's calculator", () => {
  test.each([
    ["17 + 25", 42],
    ["2 + 3 * 4", 14],
    ["(2 + 3) × 4 − 1", 19],
    ["-2^2", -4],
    ["2^-1", 0.5],
    ["2**3**2", 512],
    ["10 ÷ 4", 2.5],
    ["1.5e3 / .5", 3000],
    ["8 - 3 - 2", 3],
  ])("%s is %d", (expression, value) => expect(calculate(expression)).toBe(value));

  test.each(["", "2 +", "(1", "1)", "2 3", "alert(1)", "1/0", "0/0", `${"(".repeat(60)}1`, "−".repeat(900)])(
    "%s is refused",
    (expression) => expect(() => calculate(expression)).toThrow(),
  );

  test("what cannot be read is named with its place", () =>
    expect(() => calculate("2 + x")).toThrow("“x” at place 5"));
});

describe("a call of the page's tools", () => {
  const made = (name: string, given: string) =>
    call({ id: "a", type: "function", function: { name, arguments: given } });

  test.each([
    ["calculate", { expression: "0.1 + 0.2" }, "0.3"],
    ["convert", { value: 100, from: "°F", to: "°C" }, "37.7777777778 °C"],
    ["convert", { value: 26.2, from: "mi", to: "km" }, "42.1648128 km"],
    ["convert", { value: 0, from: "K", to: "°F" }, "-459.67 °F"],
  ])("%s %o", (name, given, result) => {
    expect(made(name, JSON.stringify(given))).toEqual({
      id: "a",
      name,
      arguments: JSON.stringify(given),
      result,
    });
  });

  test("of the time gives this year", () =>
    expect(made("current_time", "").result).toContain(String(new Date().getFullYear())));

  test.each([
    ["calculate", "{}", "expression"],
    ["calculate", "[1]", "not a JSON object"],
    ["calculate", "{", "JSON"],
    ["current_time", '{"time_zone": "Mars/Olympus"}', "not a time zone"],
    ["convert", '{"value": 1, "from": "kg", "to": "m"}', "kg cannot be converted to m"],
    ["convert", '{"value": "1", "from": "kg", "to": "g"}', "expected a number"],
    ["toString", "{}", "no tool toString"],
  ])("%s(%s) says what is wrong", (name, given, wrong) => {
    const { result, failed } = made(name, given);
    expect(failed).toBe(true);
    expect(result).toMatch(/^Error: /);
    expect(result).toContain(wrong);
  });

  test("is offered by schemas that allow nothing else", () => {
    for (const { function: offered } of OFFERED)
      expect(offered.parameters).toMatchObject({ type: "object", additionalProperties: false });
  });
});
