import { createEngine, type Engine } from "../../src/here/index.js";
import type { MessageParam } from "../../src/protocol/openai.js";
import { expectedTokens } from "./fake-backend.js";
import { type StaticServer, serve } from "./serve.js";
import { TOY_VOCAB } from "./toy-artifact.js";
import { REFUSED, TRAPS, toyWasm } from "./toy-wasm.js";

/** A real engine in this process: the toy for WebAssembly as a chat model, loaded from a server. */
export interface ToyChat {
  readonly server: StaticServer;
  readonly engine: Engine;
  close(): Promise<void>;
}

export const TEMPLATE =
  "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}" +
  "{% if add_generation_prompt %}assistant: {% endif %}";

export async function serveToyChat(): Promise<StaticServer> {
  const { files } = await toyWasm(TEMPLATE);
  return serve(async (path) => files.get(path) ?? null);
}

export async function openToyChat(): Promise<ToyChat> {
  const server = await serveToyChat();
  const engine = await createEngine(server.url);
  const close = async (): Promise<void> => {
    await engine.dispose();
    server.close();
  };
  return { server, engine, close };
}

/** The prompt that the template makes of messages. */
export function promptOf(messages: readonly MessageParam[]): string {
  return `${messages.map(({ role, content }) => `${role}: ${content} `).join("")}assistant: `;
}

/** The text that the toy gives after a prompt; it never ends by itself. */
export function textAfter(prompt: string, count: number): string {
  const ids = [...prompt].map((character) => character.charCodeAt(0) - 31);
  return expectedTokens(ids, count, TOY_VOCAB)
    .map((id) => (id === 0 || id === 96 ? "" : String.fromCharCode(id + 31)))
    .join("");
}

const DISLIKED = [TRAPS, REFUSED].map((token) => String.fromCharCode(token + 31));

/** A question for which the toy's kernels do not fail at the first `count` tokens of the answer. */
export function question(count: number, before: readonly MessageParam[] = []): string {
  for (let i = 0; ; i++) {
    const asked = `question ${i}`;
    const text = textAfter(promptOf([...before, { role: "user", content: asked }]), count);
    if (!DISLIKED.some((character) => text.includes(character))) return asked;
  }
}

/** A question whose answer fails within `count` tokens, but not at once. */
export function badQuestion(count: number): string {
  for (let i = 0; ; i++) {
    const asked = `question ${i}`;
    const text = textAfter(promptOf([{ role: "user", content: asked }]), count);
    const at = text.search(new RegExp(`[${DISLIKED.join("")}]`));
    if (at > count / 3 && at < count - 5) return asked;
  }
}
