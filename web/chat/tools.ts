/** The tools that the page offers: they compute here, contact nobody and change nothing. */

import type { FunctionTool, ToolCall } from "../src/protocol/openai.js";
import { calculate } from "./calculator.js";

/** A call as it is stored: the model's arguments and the result. */
export interface Call {
  readonly id: string;
  readonly name: string;
  /** JSON text, as the model wrote it. */
  readonly arguments: string;
  /** The text for the model: the result, or the error. */
  readonly result: string;
  readonly failed?: true;
}

type Given = Readonly<Record<string, unknown>>;

interface Tool {
  readonly description: string;
  readonly properties: Readonly<Record<string, object>>;
  readonly required: readonly string[];
  run(given: Given): string;
}

/** A unit in terms of its kind's first: value · factor + offset. */
const UNITS: Readonly<Record<string, Readonly<Record<string, readonly [factor: number, offset: number]>>>> = {
  length: { m: [1, 0], km: [1000, 0], cm: [0.01, 0], mi: [1609.344, 0], ft: [0.3048, 0], in: [0.0254, 0] },
  mass: { kg: [1, 0], g: [0.001, 0], lb: [0.45359237, 0], oz: [0.028349523125, 0] },
  volume: { l: [1, 0], ml: [0.001, 0], gal: [3.785411784, 0] },
  temperature: { "°C": [1, 0], "°F": [5 / 9, -160 / 9], K: [1, -273.15] },
};
const UNIT_NAMES = Object.values(UNITS).flatMap((units) => Object.keys(units));
const DIGITS = 12;

const TOOLS: Readonly<Record<string, Tool>> = {
  calculate: {
    description: "Computes an arithmetic expression, such as (17 + 25) * 3 / 4.",
    properties: { expression: { type: "string", maxLength: 200 } },
    required: ["expression"],
    run: (given) => String(rounded(calculate(textIn(given, "expression")))),
  },
  current_time: {
    description: "Tells today's date, the weekday and the time, here or in a time zone such as Europe/Oslo.",
    properties: { time_zone: { type: "string", maxLength: 60 } },
    required: [],
    run: (given) => timeIn(given["time_zone"] === undefined ? undefined : textIn(given, "time_zone")),
  },
  convert: {
    description: "Converts a length, mass, volume or temperature from one unit to another.",
    properties: {
      value: { type: "number" },
      from: { enum: UNIT_NAMES },
      to: { enum: UNIT_NAMES },
    },
    required: ["value", "from", "to"],
    run: (given) => convert(numberIn(given, "value"), textIn(given, "from"), textIn(given, "to")),
  },
};

/** The tools in a request's form. */
export const OFFERED: readonly FunctionTool[] = Object.entries(TOOLS).map(
  ([name, { description, properties, required }]) => ({
    type: "function",
    function: {
      name,
      description,
      parameters: { type: "object", properties, required, additionalProperties: false },
    },
  }),
);

/** Computes a call. An error becomes its result, so that the model can correct it. */
export function call({ id, function: { name, arguments: given } }: ToolCall): Call {
  const made = { id, name, arguments: given };
  try {
    const tool = Object.hasOwn(TOOLS, name) ? TOOLS[name] : undefined;
    if (!tool) throw new Error(`there is no tool ${name}`);
    return { ...made, result: tool.run(read(given)) };
  } catch (error) {
    return { ...made, result: `Error: ${error instanceof Error ? error.message : error}`, failed: true };
  }
}

function read(text: string): Given {
  const given: unknown = JSON.parse(text === "" ? "{}" : text);
  if (typeof given !== "object" || given === null || Array.isArray(given))
    throw new Error("the arguments are not a JSON object");
  return given as Given;
}

function textIn(given: Given, name: string): string {
  const value = given[name];
  if (typeof value !== "string") throw new Error(`${name} is ${JSON.stringify(value)}, expected a text`);
  return value;
}

function numberIn(given: Given, name: string): number {
  const value = given[name];
  if (typeof value !== "number") throw new Error(`${name} is ${JSON.stringify(value)}, expected a number`);
  return value;
}

/** Rounds off the last digits of binary fractions: 0.1 + 0.2 is 0.3. */
function rounded(value: number): number {
  return Number(value.toPrecision(DIGITS));
}

function timeIn(timeZone: string | undefined): string {
  try {
    return new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long", timeZone }).format();
  } catch {
    throw new Error(`${timeZone} is not a time zone: name one such as Europe/Oslo`);
  }
}

function convert(value: number, from: string, to: string): string {
  const units = Object.values(UNITS).find((kind) => Object.hasOwn(kind, from) && Object.hasOwn(kind, to));
  const [source, target] = [units?.[from], units?.[to]];
  if (!source || !target) throw new Error(`${from} cannot be converted to ${to}`);
  const base = value * source[0] + source[1];
  return `${rounded((base - target[1]) / target[0])} ${to}`;
}
