/**
 * Jinja's filters. Escaped text is ordinary text here, where Jinja marks it; the build rejects templates that use
 * escaped text further.
 */

import { atPath, attribute, binary, item } from "./access.js";
import { fixed, formatted, rounded, truncated } from "./format.js";
import { jsonText } from "./json.js";
import { method, pairsOf } from "./methods.js";
import { capitalized, lines, replaced, stripped } from "./texts.js";
import {
  compare,
  equal,
  Fault,
  type Given,
  isDict,
  misfit,
  numeric,
  Sequence,
  shown,
  size,
  Tuple,
  through,
  truth,
  typeName,
  unfit,
  type Value,
  whole,
} from "./values.js";

type Filter = readonly [names: string, run: (value: Value, ...args: readonly Value[]) => Value];

/** The functions that filters need to apply other filters and tests. */
interface Known {
  filter(name: string, value: Value, given: Given): Value;
  test(name: string, value: Value, given: Given): boolean;
}

function lowered(value: Value): Value {
  return typeof value === "string" ? value.toLowerCase() : value;
}

/**
 * Returns the function that gives the value to compare for each item: an attribute, in lower case unless case
 * matters.
 */
function keyed(attributePath: Value, caseSensitive: Value): (value: Value) => Value {
  const path = attributePath === undefined ? null : attributePath;
  return (value) => {
    const found = atPath(value, path);
    return truth(caseSensitive) ? found : lowered(found);
  };
}

function sorted(items: Iterable<Value>, key: (value: Value) => Value, reverse: Value): Value[] {
  const made = [...items].map((value) => [key(value), value] as const);
  made.sort(([a], [b]) => (truth(reverse) ? compare(b, a) : compare(a, b)));
  return made.map(([, value]) => value);
}

/** Like `keyed`, for a path that lists several attributes between commas. */
function sortKeys(path: Value, caseSensitive: Value): (value: Value) => Value {
  const paths = typeof path === "string" ? path.split(",") : [path];
  const keys = paths.map((one) => keyed(one, caseSensitive));
  return (value) => keys.map((key) => key(value));
}

function extreme(sign: 1 | -1): Filter["1"] {
  return (value, caseSensitive, path) => {
    const key = keyed(path, caseSensitive);
    let found: Value;
    let best: { readonly key: Value } | null = null;
    for (const one of through(value)) {
      if (best && compare(key(one), best.key) * sign >= 0) continue;
      best = { key: key(one) };
      found = one;
    }
    return found;
  };
}

function indented(value: Value, width: Value, first: Value, blank: Value): string {
  const by =
    typeof width === "string" ? width : " ".repeat(Math.min(width === undefined ? 4 : whole(width), 1 << 16));
  const all = lines(`${text(value)}\n`);
  const made = truth(blank)
    ? all.join(`\n${by}`)
    : all.map((line, at) => (at > 0 && line !== "" ? by + line : line)).join("\n");
  return truth(first) ? by + made : made;
}

function text(value: Value): string {
  if (typeof value !== "string") throw new Fault(`a text is expected, not ${typeName(value)}`);
  return value;
}

function reversed(value: Value): Value {
  if (typeof value === "string") return [...value].reverse().join("");
  return new Sequence("generator", [...through(value)].reverse());
}

const FLOAT = /^[+-]?(?:\d+(?:_\d+)*\.?(?:\d+(?:_\d+)*)?|\.\d+(?:_\d+)*)(?:e[+-]?\d+(?:_\d+)*)?$/i;

/** `float(value)`; null where Python's float would fail. */
function asFloat(value: Value): number | null {
  const number = numeric(value);
  if (number !== null) return Number(number);
  if (typeof value !== "string") return null;
  const written = stripped(value, null);
  if (/^[+-]?(?:inf|infinity|nan)$/i.test(written))
    return /nan/i.test(written) ? Number.NaN : written.startsWith("-") ? -Infinity : Infinity;
  return FLOAT.test(written) ? Number(written.replaceAll("_", "")) : null;
}

function asWhole(value: Value, usual: Value): Value {
  if (typeof value === "string" && /^[+-]?\d+(?:_\d+)*$/.test(stripped(value, null)))
    return BigInt(stripped(value, null).replace(/^\+/, "").replaceAll("_", ""));
  if (value === undefined) throw new Fault("a number is undefined");
  const number = typeof value === "bigint" ? value : asFloat(value);
  if (number === null || !Number.isFinite(Number(number))) return usual === undefined ? 0n : usual;
  return truncated(number);
}

function round(value: Value, precision: Value, way: Value): Value {
  const number = numeric(value);
  if (number === null) unfit(value, "cannot be rounded");
  const digits = precision === undefined ? 0 : whole(precision);
  if (Math.abs(digits) > 100) misfit();
  if (way === undefined || way === "common") {
    if (typeof number === "bigint")
      return digits >= 0 ? number : rounded(number, digits) * 10n ** BigInt(-digits);
    return digits >= 0 ? Number(fixed(number, digits)) : Number(rounded(number, digits)) * 10 ** -digits;
  }
  if (way !== "ceil" && way !== "floor") misfit();
  const scale = 10 ** digits;
  const scaled = Number(number) * scale;
  return (way === "ceil" ? Math.ceil(scaled) : Math.floor(scaled)) / scale;
}

const ENTITIES: Readonly<Record<string, string>> = {
  "&": "&amp;",
  "<": "&lt;",
  ">": "&gt;",
  '"': "&#34;",
  "'": "&#39;",
};

const escaped: Filter = ["", (value) => shown(value).replace(/[&<>"']/g, (char) => ENTITIES[char] ?? char)];
const length: Filter = ["", (value) => BigInt(size(value))];
const usual: Filter = [
  "default_value boolean",
  (value, other, boolean) =>
    value === undefined || (truth(boolean) && !truth(value)) ? (other === undefined ? "" : other) : value,
];

function* unique(value: Value, caseSensitive: Value, path: Value): Iterable<Value> {
  const key = keyed(path, caseSensitive);
  const seen: Value[] = [];
  for (const one of through(value)) {
    const own = key(one);
    if (seen.some((other) => equal(other, own))) continue;
    seen.push(own);
    yield one;
  }
}

export const FILTERS: Readonly<Record<string, Filter>> = {
  abs: [
    "",
    (value) => {
      const number = numeric(value);
      if (number === null) unfit(value, "has no size");
      return number < 0 ? -number : number;
    },
  ],
  attr: [
    "name",
    (value, name) => {
      const own = method(value, text(name));
      if (own || !isDict(value)) return own ?? attribute(value, text(name));
      return undefined;
    },
  ],
  capitalize: ["", (value) => capitalized(shown(value))],
  count: length,
  d: usual,
  default: usual,
  dictsort: [
    "case_sensitive by reverse",
    (value, caseSensitive, by, reverse) => {
      if (!isDict(value)) unfit(value, "is not a dict");
      const place = by === "value" ? 1n : 0n;
      const key = (pair: Value) => (truth(caseSensitive) ? item(pair, place) : lowered(item(pair, place)));
      return sorted(pairsOf(value), key, reverse);
    },
  ],
  e: escaped,
  escape: escaped,
  first: [
    "",
    (value) => {
      for (const one of through(value)) return one;
      return undefined;
    },
  ],
  float: [
    "default",
    (value, other) => {
      if (value === undefined) throw new Fault("a number is undefined");
      return asFloat(value) ?? (other === undefined ? 0 : other);
    },
  ],
  indent: ["width first blank", indented],
  int: ["default", asWhole],
  items: [
    "",
    (value) => {
      if (value !== undefined && !isDict(value)) unfit(value, "has no items");
      return new Sequence("generator", value ? pairsOf(value) : []);
    },
  ],
  join: [
    "d attribute",
    (value, by, path) => {
      const items = [...through(value)].map((one) => (path === undefined ? one : atPath(one, path)));
      return items.map(shown).join(by === undefined ? "" : shown(by));
    },
  ],
  last: [
    "",
    (value) => {
      if (value instanceof Sequence && value.kind === "generator")
        throw new Fault("a generator has no last item");
      return [...through(value)].at(-1);
    },
  ],
  length,
  list: ["", (value) => [...through(value)]],
  lower: ["", (value) => shown(value).toLowerCase()],
  max: ["case_sensitive attribute", extreme(-1)],
  min: ["case_sensitive attribute", extreme(1)],
  replace: [
    "s new count",
    (value, old, by, most) =>
      replaced(shown(value), shown(old), shown(by), most === undefined || most === null ? -1 : whole(most)),
  ],
  reverse: ["", reversed],
  round: ["precision method", round],
  safe: ["", shown],
  sort: [
    "reverse case_sensitive attribute",
    (value, reverse, caseSensitive, path) => sorted(through(value), sortKeys(path, caseSensitive), reverse),
  ],
  string: ["", shown],
  sum: [
    "attribute start",
    (value, path, start) =>
      [...through(value)].reduce(
        (made: Value, one) => binary("+", made, path === undefined ? one : atPath(one, path)),
        start === undefined ? 0n : start,
      ),
  ],
  title: [
    "",
    (value) =>
      shown(value)
        .split(/([-\s({[<]+)/u)
        .map((part) => {
          const [first = "", ...rest] = part;
          return first.toUpperCase() + rest.join("").toLowerCase();
        })
        .join(""),
  ],
  tojson: [
    "ensure_ascii indent separators sort_keys",
    (value, ascii, indent, separators, sortKeys) =>
      jsonText(value, { ascii: truth(ascii), indent, separators, sorted: truth(sortKeys) }),
  ],
  trim: [
    "chars",
    (value, chars) => stripped(shown(value), chars === undefined || chars === null ? null : text(chars)),
  ],
  unique: [
    "case_sensitive attribute",
    (value, caseSensitive, path) => new Sequence("generator", unique(value, caseSensitive, path)),
  ],
  upper: ["", (value) => shown(value).toUpperCase()],
};

type Varied = (value: Value, given: Given, known: Known) => Value;

/**
 * Makes a filter that keeps the items which pass a test (`wanted`) or fail it; `ofAttribute` says that the test is
 * about an attribute of the items.
 */
function choosing(wanted: boolean, ofAttribute: boolean): Varied {
  return (value, { args, named }, known) => {
    const [path, ...more] = ofAttribute ? args : [null, ...args];
    const [name, ...others] = more;
    if (path === undefined) misfit();
    const fits = (one: Value): boolean => {
      const own = atPath(one, path);
      return name === undefined ? truth(own) : known.test(text(name), own, { args: others, named });
    };
    return new Sequence(
      "generator",
      where(value, (one) => fits(one) === wanted),
    );
  };
}

function* where(value: Value, fits: (one: Value) => boolean): Iterable<Value> {
  if (truth(value)) for (const one of through(value)) if (fits(one)) yield one;
}

function* mapped(value: Value, change: (one: Value) => Value): Iterable<Value> {
  // As in Jinja, an empty or false value need not be iterable.
  if (truth(value)) for (const one of through(value)) yield change(one);
}

function map(value: Value, { args, named }: Given, known: Known): Value {
  const [name, ...others] = args;
  let change: (one: Value) => Value;
  if (name === undefined) {
    for (const given of named.keys()) if (given !== "attribute" && given !== "default") misfit();
    if (!named.has("attribute")) misfit();
    change = (one) => atPath(one, named.get("attribute"), named.get("default"));
  } else change = (one) => known.filter(text(name), one, { args: others, named });
  return new Sequence("generator", mapped(value, change));
}

/** Filters that take any number of arguments. */
export const VARIED: Readonly<Record<string, Varied>> = {
  map,
  select: choosing(true, false),
  reject: choosing(false, false),
  selectattr: choosing(true, true),
  rejectattr: choosing(false, true),
  format: (value, { args, named }) => {
    if (args.length > 0 && named.size > 0) misfit();
    return formatted(shown(value), named.size > 0 ? new Map<Value, Value>(named) : new Tuple(args));
  },
};
