/**
 * How hard a prompt looks, 0 to 1, from the same model.json and by the same rules as
 * nearfar.routing.difficulty in Python: ASCII classes only, ASCII lower case, typographic signs folded to
 * ASCII, lengths in code points.
 */

/**
 * The model as scripts/train_difficulty.py writes it; the build copies it to dist/routing/difficulty.json.
 */
export interface DifficultyModel {
  readonly format: number;
  readonly categories: Readonly<Record<string, string>>;
  readonly heads: { readonly open: LinearHead; readonly choice: LinearHead };
  readonly knots: readonly number[];
}

/** A logistic regression: its features, how each is scaled, their weights. */
export interface LinearHead {
  readonly features: readonly string[];
  readonly mean: readonly number[];
  readonly scale: readonly number[];
  readonly weights: readonly number[];
  readonly slope: number;
  readonly intercept: number;
}

export interface Difficulty {
  /** The share of the reference prompts that look easier. Any string has a score; the work is bounded. */
  score(prompt: string): number;
}

/** A message of OpenAI's chat completions, as far as it is read here. */
interface Message {
  readonly role: string;
  readonly content?: unknown;
}

type Features = Record<string, number>;
type Tally = readonly number[];

const FORMAT = 1;
/** Code points that are read at either end of a prompt longer than twice that. */
const HALF = 4096;
const CLIP = 4;
/** A sample prompt of each kind, to find out which features it has. */
const SAMPLES = { open: "", choice: "?\nA. 1\nB. 2" };
/** A last message of fewer code points is read together with the user's message before it. */
const SHORT = 80;

const FROM = "“”„«»‘’–—−…\u00a0\u3000。．？！，、；：؟،";
const TO = '"""""\'\'---. \u0020..?!,,;:?,';
const FOLD = new Map([...FROM].map((sign, at) => [sign, TO[at] ?? ""]));
const FOLDED = new RegExp(`[${FROM}]`, "gu");
const ANSWER = /\n *[Aa]nswer:? *\n*$/u;
const OPTION = /\n[ \t]*\(?[A-J][.):][ \t]+/u;
const WORD = /[a-z0-9'\u0080-\u{10ffff}]+/gu;
const NUMBER = /[0-9]+(?:[.,][0-9]+)*/gu;
const SENTENCE = /[.!?]+(?=[ \t\r\n]|$)/gu;
const CAPITAL = /(?<![A-Za-z])[A-Z][a-z]/gu;
const CAPITALS = /(?<![A-Za-z])[A-Z]{2,}(?![A-Za-z])/gu;
const EMPHASIS = /(?<![A-Za-z])(?:NOT|EXCEPT|LEAST|BEST|MOST)(?![A-Za-z])/u;

/** Makes a scorer from a model or its address. Rejects with a message that names the address. */
export async function loadDifficulty(source: DifficultyModel | URL | string): Promise<Difficulty> {
  if (typeof source === "object" && !(source instanceof URL)) return scorer(source);
  const response = await fetch(source);
  if (!response.ok) throw new Error(`the difficulty model ${source} answers HTTP ${response.status}`);
  return scorer((await response.json()) as DifficultyModel);
}

/**
 * The text to score: the last user message, and the one before it if the last is short. System prompts are
 * left out.
 */
export function messagesToPrompt(messages: readonly Message[]): string {
  const texts = messages.filter(({ role }) => role === "user").map(({ content }) => textOf(content));
  const last = texts.at(-1) ?? "";
  return length(last) < SHORT ? texts.slice(-2).join("\n") : last;
}

function textOf(content: unknown): string {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  const parts = content.filter((part) => part?.type === "text");
  return parts.map((part) => String(part.text ?? "")).join("\n");
}

function scorer(model: DifficultyModel): Difficulty {
  if (model.format !== FORMAT)
    throw new Error(`the difficulty model has format ${model.format}; this version reads ${FORMAT}`);
  const categories = Object.keys(model.categories);
  const lexicon = new Map<string, number[]>();
  for (const [at, words] of Object.values(model.categories).entries())
    for (const word of words.split(" ")) lexicon.set(word, [...(lexicon.get(word) ?? []), at]);
  for (const kind of ["open", "choice"] as const) {
    const { found } = features(SAMPLES[kind], categories, lexicon);
    const missing = model.heads[kind].features.filter((name) => !(name in found));
    if (missing.length > 0)
      throw new Error(`the difficulty model asks for unknown features: ${missing.join(", ")}`);
  }
  return {
    score(prompt) {
      const { choice, found } = features(prompt, categories, lexicon);
      return rank(probability(model.heads[choice ? "choice" : "open"], found), model.knots);
    },
  };
}

function probability(head: LinearHead, found: Features): number {
  let total = 0;
  for (const [at, name] of head.features.entries()) {
    const standard = ((found[name] ?? 0) - (head.mean[at] ?? 0)) / (head.scale[at] ?? 1);
    total += (head.weights[at] ?? 0) * Math.max(-CLIP, Math.min(CLIP, standard));
  }
  return 1 / (1 + Math.exp(-Math.max(-30, Math.min(30, head.slope * total + head.intercept))));
}

function rank(value: number, knots: readonly number[]): number {
  const above = knots.findIndex((knot) => knot > value);
  if (above < 0) return 1;
  if (above === 0 || value === knots[0]) return 0;
  const low = knots[above - 1] ?? 0;
  return (above - 1 + (value - low) / ((knots[above] ?? 1) - low)) / (knots.length - 1);
}

/** The prompt cut, folded, and split at lines that begin like `A. `, `B) ` or `(C) `. */
function partsOf(prompt: string): { text: string; stem: string; options: string[] } {
  const text = cut(prompt)
    .replace(/\p{Surrogate}/gu, "\ufffd")
    .replace(FOLDED, (sign) => FOLD.get(sign) ?? sign)
    .replace(ANSWER, "");
  const [stem = "", ...options] = text.split(OPTION);
  return { text, stem, options };
}

function cut(prompt: string): string {
  if (prompt.length <= 2 * HALF) return prompt;
  if (prompt.length <= 4 * HALF && length(prompt) <= 2 * HALF) return prompt;
  const head = [...prompt.slice(0, 2 * HALF)].slice(0, HALF);
  const tail = [...prompt.slice(-2 * HALF)].slice(-HALF);
  return `${head.join("")}\n${tail.join("")}`;
}

function features(
  prompt: string,
  categories: readonly string[],
  lexicon: ReadonlyMap<string, readonly number[]>,
) {
  const { text, stem, options } = partsOf(prompt);
  const choice = options.length >= 2;
  const asked = words(stem);
  const found = { ...amount(stem, asked), ...presence(stem, tally(asked, categories, lexicon), categories) };
  if (!choice) return { choice, found };
  const all = words(text);
  Object.assign(found, shape(text, all), optionFeatures(options.slice(0, 10), text, asked));
  return {
    choice,
    found: Object.assign(found, lexical(all.length, tally(all, categories, lexicon), categories)),
  };
}

/** Features of the amount to read and to keep in mind. */
function amount(stem: string, asked: readonly string[]): Features {
  const sentences = count(SENTENCE, stem);
  return {
    stem_chars: Math.log1p(length(stem)),
    stem_sentences: Math.log1p(sentences),
    stem_sentence_words: Math.log1p(asked.length / Math.max(1, sentences)),
    stem_distinct: new Set(asked).size / Math.max(1, asked.length),
    stem_commas: Math.log1p(signs(stem, ",")),
  };
}

/** Features of the kind of work: 0, 1/2 for one occurrence, 1 for two or more. */
function presence(stem: string, seen: Tally, categories: readonly string[]): Features {
  const found: Features = {};
  for (const [at, name] of categories.entries()) found[`has_${name}`] = twice(seen[at] ?? 0);
  found.has_number = twice(count(NUMBER, stem) + (seen[categories.indexOf("number")] ?? 0));
  found.has_operator = twice(signs(stem, "+*/=^<>|~"));
  found.has_code = twice(signs(stem, "{}\\_;"));
  found.has_parenthesis = twice(signs(stem, "("));
  found.has_quote = twice(signs(stem, '"'));
  return found;
}

/** Features of the whole text: lengths, digits, signs and capitals. */
function shape(text: string, all: readonly string[]): Features {
  const letters = all.filter((word) => !digit(word));
  const [total, number, chars] = [
    Math.max(1, letters.length),
    Math.max(1, all.length),
    Math.max(1, length(text)),
  ];
  const lengths = letters.map(length);
  return {
    chars: Math.log1p(length(text)),
    mean_word: sum(lengths) / total,
    words_of_8: lengths.filter((size) => size >= 8).length / total,
    words_of_11: lengths.filter((size) => size >= 11).length / total,
    distinct: new Set(all).size / number,
    number_share: (all.length - letters.length) / number,
    numbers: Math.log1p(all.length - letters.length),
    digit_share: signs(text, "0123456789") / chars,
    operators: Math.log1p(signs(text, "+*/=^<>")),
    brackets: Math.log1p(signs(text, "([")),
    markup: Math.log1p(signs(text, "{\\$_")),
    dollars: Math.log1p(signs(text, "$")),
    percents: Math.log1p(signs(text, "%")),
    quotes: Math.log1p(signs(text, '"')),
    lines: Math.log1p(signs(text, "\n")),
    capitals: count(CAPITAL, text) / number,
    all_capitals: count(CAPITALS, text) / number,
    comma_share: signs(text, ",") / number,
    colon_share: signs(text, ":;") / number,
    hyphen_share: signs(text, "-") / number,
    emphasis: EMPHASIS.test(text) ? 1 : 0,
    blank: text.includes("__") ? 1 : 0,
    questions: Math.log1p(signs(text, "?")),
    single_letters: Math.log1p(letters.filter((word) => length(word) === 1 && !"ais".includes(word)).length),
  };
}

/** Features of the options: their length, similarity, and share of numbers. */
function optionFeatures(options: readonly string[], text: string, asked: readonly string[]): Features {
  const split = options.map(words);
  const sets = split.map((option) => new Set(option));
  const lengths = options.map(length);
  const n = options.length;
  const mean = sum(lengths) / n;
  const stem = new Set(asked);
  const alike = sets.flatMap((a, at) =>
    sets.slice(0, at).map((b) => shared(a, b) / Math.max(1, a.size + b.size - shared(a, b))),
  );
  const joined = lower(text);
  return {
    option_chars: Math.log1p(mean),
    option_spread: Math.log1p(Math.sqrt(sum(lengths.map((size) => (size - mean) ** 2)) / n)),
    option_numeric: split.filter((option) => option.some(digit)).length / n,
    option_short: split.filter((option) => option.length <= 2).length / n,
    option_overlap: sum(sets.map((option) => shared(option, stem) / Math.max(1, option.size))) / n,
    option_alike: sum(alike) / Math.max(1, alike.length),
    of_the_following: joined.includes("of the following") ? 1 : 0,
    all_or_none: ["all of the", "none of the", "both "].some((some) => joined.includes(some)) ? 1 : 0,
    statements: joined.startsWith("statement 1") ? 1 : 0,
  };
}

/** The number of words of each category, and their share of all words. */
function lexical(total: number, seen: Tally, categories: readonly string[]): Features {
  const found: Features = {};
  for (const [at, name] of categories.entries()) {
    found[`log_${name}`] = Math.log1p(seen[at] ?? 0);
    found[`share_${name}`] = (seen[at] ?? 0) / Math.max(1, total);
  }
  return found;
}

function tally(
  all: readonly string[],
  categories: readonly string[],
  lexicon: ReadonlyMap<string, readonly number[]>,
): Tally {
  const seen = new Array<number>(categories.length).fill(0);
  for (const word of all) for (const at of lexicon.get(word) ?? []) seen[at] = (seen[at] ?? 0) + 1;
  return seen;
}

/** toLowerCase of everything would depend on the version of Unicode. */
function lower(text: string): string {
  return text.replace(/[A-Z]+/g, (run) => run.toLowerCase());
}

function words(text: string): string[] {
  return lower(text).match(WORD) ?? [];
}

function count(pattern: RegExp, text: string): number {
  return text.match(pattern)?.length ?? 0;
}

/** Counts how many of the characters are one of these (ASCII). */
function signs(text: string, some: string): number {
  let found = 0;
  for (const sign of some) found += text.split(sign).length - 1;
  return found;
}

/** The length in code points. */
function length(text: string): number {
  let pairs = 0;
  for (let at = 1; at < text.length; at++) {
    const low = text.charCodeAt(at) & 0xfc00;
    if (low === 0xdc00 && (text.charCodeAt(at - 1) & 0xfc00) === 0xd800) pairs++;
  }
  return text.length - pairs;
}

function digit(word: string): boolean {
  return word[0] !== undefined && word[0] >= "0" && word[0] <= "9";
}

function shared(a: ReadonlySet<string>, b: ReadonlySet<string>): number {
  let found = 0;
  for (const word of a) if (b.has(word)) found++;
  return found;
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

function twice(value: number): number {
  return Math.min(value, 2) / 2;
}
