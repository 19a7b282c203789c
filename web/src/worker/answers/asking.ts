/**
 * Writes the grammar of an answer with tool calls as a structural tag of xgrammar (tests/vectors/tools holds
 * examples).
 */

import type { Grammar } from "../../protocol/grammar.js";
import type { Calling } from "../../protocol/messages.js";
import type { FunctionTool } from "../../protocol/openai.js";
import { checkSchemas } from "./bounds.js";
import type { AnswerFormat, CallFormat } from "./format.js";
import { behindName, literals, MEMBERS, noCallOf, TRIGGER } from "./loose-grammar.js";
import { argumentSchema } from "./parameters.js";
import type { SpelledArguments } from "./tags.js";
import {
  type Around,
  around,
  constant,
  either,
  inOrder,
  repeated,
  schemaTag,
  type Tag,
  tag,
} from "./tags.js";

/**
 * Builds the grammar of an answer: calls of the offered tools, the format of `wanted`, or either of them; null if the
 * answer may be any text. The grammar allows a section of reasoning before the answer; `reasoningOpen` says that the
 * prompt has already begun that section. If calls are required, `wanted` is ignored, because such an answer has no
 * text beside its calls. `spelled` loads the code that writes arguments which are not JSON.
 */
export async function answerGrammar(
  form: AnswerFormat,
  calling: Calling | null,
  wanted: Grammar | null,
  reasoningOpen: boolean,
  spelled: () => Promise<SpelledArguments>,
): Promise<Grammar | null> {
  const { calls } = form;
  if (!calls || !calling) {
    if (!wanted || !(form.reasoning || form.text)) return wanted;
    return structural(afterReasoning(form, textOf(form, wanted), reasoningOpen, true));
  }
  checkSchemas(calling.tools);
  const writeSpelled = calls.spelling ? await spelled() : null;
  // xgrammar 0.1.27 cannot combine an open-ended repetition with an alternative.
  const many = wanted && !calling.required ? calls.listed : calls.listed || calls.repeats;
  const writer = new Calls(calls, calling.tools, calling.parallel && many, writeSpelled);
  const must = calling.required || wanted !== null;
  const content = (): Tag => {
    if (calling.required) return writer.only();
    return wanted ? either([writer.only(), textOf(form, wanted)]) : writer.inText();
  };
  return structural(afterReasoning(form, content(), reasoningOpen, must));
}

function structural(format: Tag): Grammar {
  return { kind: "structural_tag", text: JSON.stringify({ type: "structural_tag", format }) };
}

/**
 * Adds an optional section of reasoning before the content. `must` says that an answer needs the content: then a
 * section that the prompt has begun has to end.
 */
function afterReasoning({ reasoning }: AnswerFormat, content: Tag, opened: boolean, must: boolean): Tag {
  if (!reasoning) return content;
  const thought = tag(opened ? "" : reasoning.begin, { type: "any_text" }, reasoning.end);
  const between = reasoning.after ? constant(reasoning.after) : { type: "regex", pattern: "\\n{0,2}" };
  const thinking = inOrder([thought, between, content]);
  return opened && must ? thinking : either([thinking, content]);
}

/** The grammar that the request asks for, behind the mark with which the model begins text for the user. */
function textOf({ text }: AnswerFormat, wanted: Grammar): Tag {
  const content = asTag(wanted);
  return text ? inOrder([constant(text), content]) : content;
}

function asTag({ kind, text }: Grammar): Tag {
  switch (kind) {
    case "json_schema":
      return schemaTag(JSON.parse(text), true, "response_format");
    case "json_object":
      return schemaTag({ type: "object", additionalProperties: true }, true, "response_format");
    case "regex":
      return { type: "regex", pattern: text };
    case "ebnf":
      return { type: "grammar", grammar: text };
    default:
      return (JSON.parse(text) as { format: Tag }).format;
  }
}

/** Writes the grammar of calls of `tools`; `several` says that an answer may have more than one call. */
class Calls {
  constructor(
    private readonly form: CallFormat,
    private readonly tools: readonly FunctionTool[],
    private readonly several: boolean,
    private readonly spelled: SpelledArguments | null,
  ) {}

  /**
   * Allows any text, and calls within it: text that begins as a call has to be a call. If the format has calls
   * without marks, an answer is either calls alone or text alone.
   */
  inText(): Tag {
    const { bare, begin, repeats } = this.form;
    if (bare) {
      const starts = [bare, begin].filter((start) => start !== "");
      return either([this.only(), { type: "regex", pattern: otherThan(starts) }]);
    }
    return {
      type: "triggered_tags",
      triggers: [begin, TRIGGER],
      tags: [...this.#sections(), this.#loose()],
      stop_after_first: !(repeats && this.several),
    };
  }

  /** Calls that are JSON objects without marks around them, with any line breaks in them (loose.ts reads these). */
  #loose(): Tag {
    const calls = this.tools.map(({ function: { name, parameters, strict } }) =>
      inOrder([
        { type: "regex", pattern: behindName(name) },
        { ...schemaTag(argumentSchema(parameters), strict === true, "tools"), spaced: true },
      ]),
    );
    const call = inOrder([either(calls), { type: "grammar", grammar: MEMBERS }]);
    const others = noCallOf(this.tools.map((tool) => tool.function.name));
    return tag(TRIGGER, either([{ type: "regex", pattern: others }, call]), "");
  }

  only(): Tag {
    const { begin, bare, repeats, separator } = this.form;
    const sections = begin ? this.#sections() : [];
    if (repeats && this.several && separator) return repeated(sections, separator);
    // xgrammar has no empty separator, and with triggered tags any text between two calls is skipped.
    if (repeats && this.several)
      return { type: "triggered_tags", triggers: [begin], tags: sections, at_least_one: true };
    return either([...(bare ? this.#inside("", "") : []), ...sections]);
  }

  /** Calls between the marks of the format. */
  #sections(): Around[] {
    const { begin, blank, end } = this.form;
    return this.#inside(begin + blank, blank + end);
  }

  /** One tag for each tool, or, if the format lists calls, one tag whose list takes calls of all tools. */
  #inside(begin: string, end: string): Around[] {
    const each = this.tools.map((tool) => this.#call(tool));
    if (!this.form.listed) return each.map((call) => around(begin, call, end));
    const listed = this.several ? [tag("", repeated(each, ", "), "")] : each;
    return listed.map((call) => around(`${begin}[`, call, `]${end}`));
  }

  #call({ function: { name, parameters, strict } }: FunctionTool): Around {
    const { named, spelling, name: key, arguments: word } = this.form;
    const schema = argumentSchema(parameters);
    const isStrict = strict === true;
    if (named && spelling && this.spelled)
      return around(named.before + name + named.after, this.spelled(spelling, schema, isStrict), "");
    const json = schemaTag(schema, isStrict, "tools");
    if (named) return tag(named.before + name + named.after, json, "");
    return tag(`{"${key}": ${JSON.stringify(name)}, "${word}": `, json, "}");
  }
}

/** A regular expression for texts, the empty text included, that begin with none of `starts`. */
function otherThan(starts: readonly string[]): string {
  const begun = starts.flatMap((start) => [...start].map((_, at) => start.slice(0, at)));
  const ways = [...new Set(begun)]
    .sort()
    .filter((text) => !starts.some((start) => text.startsWith(start)))
    .map((text) => {
      const nexts = starts
        .filter((start) => start.startsWith(text))
        .map((start) => start.charAt(text.length));
      const others = literals([...new Set(nexts)].sort().join(""));
      return `${literals(text)}([^${others}][\\s\\S]*)?`;
    });
  return ways.join("|");
}
