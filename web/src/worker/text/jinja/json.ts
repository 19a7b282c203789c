/** Writes a value as JSON, as Python's json.dumps does. */

import { floatText } from "./exact.js";
import { compareTexts } from "./texts.js";
import { isDict, isList, misfit, numeric, Tuple, unfit, type Value, whole } from "./values.js";

export interface JsonStyle {
  readonly ascii: boolean;
  readonly indent: Value;
  readonly separators: Value;
  readonly sorted: boolean;
}

const MOST_INDENT = 64;
const PLAIN: JsonStyle = { ascii: false, indent: null, separators: null, sorted: false };

export function jsonText(value: Value, style: JsonStyle = PLAIN): string {
  const { indent } = style;
  const indentation =
    typeof indent === "string" ? indent : isAbsent(indent) ? null : " ".repeat(widthOf(indent));
  const [between = indentation === null ? ", " : ",", colon = ": "] = separatorsOf(style.separators);
  const key = (one: Value): string => {
    if (typeof one === "string") return written(one, style.ascii);
    return `"${scalar(one)}"`;
  };
  const joined = (
    parts: readonly string[],
    [open, close]: readonly [string, string],
    depth: number,
  ): string => {
    if (parts.length === 0) return open + close;
    if (indentation === null) return open + parts.join(between) + close;
    const line = `\n${indentation.repeat(depth + 1)}`;
    return `${open}${line}${parts.join(between + line)}\n${indentation.repeat(depth)}${close}`;
  };
  const write = (one: Value, depth: number): string => {
    if (typeof one === "string") return written(one, style.ascii);
    if (one instanceof Tuple || isList(one)) {
      const items = one instanceof Tuple ? one.items : one;
      return joined(
        items.map((each) => write(each, depth + 1)),
        ["[", "]"],
        depth,
      );
    }
    if (!isDict(one)) return scalar(one);
    const entries = [...one];
    if (style.sorted) entries.sort(([a], [b]) => compareTexts(String(a), String(b)));
    const members = entries.map(([name, each]) => `${key(name)}${colon}${write(each, depth + 1)}`);
    return joined(members, ["{", "}"], depth);
  };
  return write(value, 0);
}

function isAbsent(value: Value): boolean {
  return value === null || value === undefined;
}

function widthOf(indent: Value): number {
  const width = Math.max(Number(numeric(indent) ?? whole(indent)), 0);
  if (width > MOST_INDENT) misfit();
  return width;
}

function separatorsOf(given: Value): string[] {
  if (isAbsent(given)) return [];
  const items = given instanceof Tuple ? given.items : isList(given) ? given : [];
  const texts = items.filter((one) => typeof one === "string");
  if (texts.length !== 2) misfit();
  return texts;
}

function scalar(value: Value): string {
  if (value === null) return "null";
  if (typeof value === "boolean") return String(value);
  if (typeof value === "bigint") return String(value);
  if (typeof value !== "number") unfit(value, "cannot be written as JSON");
  if (Number.isNaN(value)) return "NaN";
  return Number.isFinite(value) ? floatText(value) : value > 0 ? "Infinity" : "-Infinity";
}

function written(text: string, ascii: boolean): string {
  const made = JSON.stringify(text);
  if (!ascii) return made;
  return made.replace(/[^ -~]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
