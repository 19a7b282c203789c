import { createEngine, type Engine } from "../../src/here/index.js";
import { serve } from "./serve.js";
import { parrotWasm } from "./toy-wasm.js";

/** A real engine in this process whose model answers as the conversation says (see `says`). */
export interface Parrot {
  readonly engine: Engine;
  close(): Promise<void>;
}

/** The answer format of Hermes and Qwen: calls and reasoning. */
export const HERMES = {
  family: "hermes",
  reasoning: { begin: "<think>", end: "</think>" },
  calls: {
    begin: "<tool_call>",
    end: "</tool_call>",
    blank: "\n",
    separator: "\n",
    repeats: true,
  },
};

/** A template that writes out tools, calls and results. */
export const TOOLS_TEMPLATE =
  "{% if tools %}tools: {{ tools | tojson }} {% endif %}{% for message in messages %}{{ message.role }}: " +
  "{{ message.content }} {% if message.tool_calls %}{% for call in message.tool_calls %}called " +
  "{{ call.function.name }}({{ call.function.arguments | tojson }}) {% endfor %}{% endif %}{% endfor %}" +
  "{% if add_generation_prompt %}assistant:@{% endif %}";

export async function openParrot(
  template = TOOLS_TEMPLATE,
  answers: object | null = HERMES,
): Promise<Parrot> {
  const { files } = await parrotWasm(template, { answers });
  const server = await serve(async (path) => files.get(path) ?? null);
  const engine = await createEngine(server.url);
  const close = async (): Promise<void> => {
    await engine.dispose();
    server.close();
  };
  return { engine, close };
}

/** The part of a message that sets the model's answer; the last one counts. Excludes ^, ~, @ and `. */
export function says(text: string): string {
  return `^${text}~`;
}

/** A call in the format HERMES. */
export function callOf(name: string, given: object): string {
  const body = JSON.stringify({ name, arguments: given }).replaceAll(/":/g, '": ').replaceAll(/,"/g, ', "');
  return `<tool_call>\n${body}\n</tool_call>`;
}
