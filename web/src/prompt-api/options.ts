import type { ChatMessage } from "../protocol/openai.js";
import type {
  CreateCoreOptions,
  LanguageModelTool,
  PromptInput,
  PromptMessage,
  PromptOptions,
} from "./types.js";

/** Checks the Prompt API's arguments and converts them to the engine's requests. */

export interface Sampling {
  readonly temperature?: number;
  readonly top_k?: number;
}

/**
 * The first kind of content in the options that the models here do not support; null if all are supported.
 */
export function unsupportedOf({ expectedInputs, expectedOutputs }: CreateCoreOptions): string | null {
  const other = [...(expectedInputs ?? []), ...(expectedOutputs ?? [])].find(({ type }) => type !== "text");
  return other ? `content of type ${other.type}` : null;
}

export function checkOptions(options: CreateCoreOptions): Sampling {
  const unsupported = unsupportedOf(options);
  if (unsupported) throw notSupported(`${unsupported} is not supported by this model`);
  const { temperature, topK } = options;
  if (temperature !== undefined && !(temperature >= 0))
    throw new RangeError(`temperature must be 0 or more, not ${temperature}`);
  if (topK !== undefined && !(topK >= 1)) throw new RangeError(`topK must be 1 or more, not ${topK}`);
  return {
    ...(temperature !== undefined && { temperature }),
    ...(topK !== undefined && { top_k: Math.floor(topK) }),
  };
}

/** The tools of a session. Throws TypeError for an invalid one. */
export function toolsOf({ tools = [] }: CreateCoreOptions): readonly LanguageModelTool[] {
  const names = new Set<string>();
  return [...tools].map((tool, at) => {
    const { name, description, inputSchema, execute } = tool ?? {};
    if (typeof name !== "string" || typeof description !== "string")
      throw new TypeError(`tools[${at}] must have a name and a description`);
    if (typeof inputSchema !== "object" || inputSchema === null)
      throw new TypeError(`tools[${at}].inputSchema must be a JSON schema`);
    if (typeof execute !== "function") throw new TypeError(`tools[${at}].execute must be a function`);
    if (names.has(name)) throw new TypeError(`tools[${at}] has the same name as another tool: ${name}`);
    names.add(name);
    return tool;
  });
}

export interface Messages {
  readonly messages: readonly ChatMessage[];
  /** Whether the answer continues the last message. */
  readonly isPrefix: boolean;
}

/** Converts the input to messages. `name` is the argument's name in errors. */
export function messagesOf(input: PromptInput, name = "input"): Messages {
  if (typeof input === "string") return { messages: [{ role: "user", content: input }], isPrefix: false };
  if (!Array.isArray(input)) throw new TypeError(`${name} must be a string or a list of { role, content }`);
  const listed: readonly PromptMessage[] = input;
  const isPrefix = listed.at(-1)?.prefix === true;
  const messages = listed.map((message, at): ChatMessage => {
    const where = `${name}[${at}]`;
    const { role, content } = message;
    if (!["system", "user", "assistant"].includes(role))
      throw new TypeError(`${where}.role must be system, user or assistant, not ${JSON.stringify(role)}`);
    if (role === "system" && (name !== "initialPrompts" || at > 0))
      throw new TypeError(`${where} is a system message, which may only be the first of initialPrompts`);
    if (message.prefix && (at < listed.length - 1 || role !== "assistant" || name === "initialPrompts"))
      throw new SyntaxError(
        `${where}.prefix: only an assistant's message at the end of a prompt may be a prefix`,
      );
    return { role, content: textOf(content, where) };
  });
  return { messages, isPrefix };
}

function textOf(content: PromptMessage["content"], where: string): string {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) throw new TypeError(`${where}.content must be a string or a list of parts`);
  return content
    .map(({ type, value }) => {
      if (type !== "text") throw notSupported(`${where} has content of type ${type}: this model reads text`);
      if (typeof value !== "string") throw new TypeError(`${where} has a text whose value is not a string`);
      return value;
    })
    .join("");
}

/**
 * Converts a constraint to the fields of a request: OpenAI's for schemas, and nearfar's own for regular
 * expressions.
 */
export function formatOf({ responseConstraint }: PromptOptions): object {
  if (responseConstraint === undefined) return {};
  if (!(responseConstraint instanceof RegExp)) {
    const json_schema = { name: "response", schema: responseConstraint, strict: true };
    return { response_format: { type: "json_schema", json_schema } };
  }
  const { source, flags } = responseConstraint;
  if (flags !== "")
    throw notSupported(`responseConstraint: flags of an expression (${flags}) are not supported`);
  return { response_format: { type: "regex", regex: source } };
}

export function notSupported(message: string): DOMException {
  return new DOMException(message, "NotSupportedError");
}
