/**
 * The records of a response: whole, or as the events of a stream. An item is added, its parts and texts come
 * in deltas, then text, part and item are sent again whole. edge_runtime/openai/responses/shape.py does the
 * same.
 */

import type { ChatLogprobs, FinishReason, ToolCallDelta } from "../protocol/openai.js";
import { functionsOf } from "./asking.js";
import type { Wanted } from "./types.js";

type Json = Record<string, unknown>;

/** A part of an answer. */
export interface Piece {
  readonly text?: string;
  readonly reasoning?: string;
  readonly calls?: readonly ToolCallDelta[];
  readonly logprobs?: ChatLogprobs["content"];
  readonly finish?: FinishReason | null;
}

/** The tokens of a request. */
export interface TokenCounts {
  readonly prompt: number;
  readonly completion: number;
  readonly cached: number;
}

/** The reason in `incomplete_details`, by the answer's finish reason; the last two come from servers. */
const INCOMPLETE: Readonly<Record<string, string>> = {
  length: "max_output_tokens",
  content_filter: "content_filter",
  abort: "cancelled",
};

class OpenItem {
  text = "";
  logprobs: unknown[] = [];
  status = "in_progress";

  constructor(
    readonly kind: "reasoning" | "message" | "function_call",
    readonly index: number,
    readonly id: string,
    readonly call: Json = {},
  ) {}

  record(): Json {
    const { kind, id, text, call, status } = this;
    const head = { id, type: kind, status };
    if (kind === "function_call") return { ...head, ...call, arguments: text };
    if (kind === "reasoning") return { ...head, summary: [], content: text ? [this.part] : [] };
    const content = text || status !== "in_progress" ? [this.part] : [];
    return { ...head, role: "assistant", content };
  }

  get part(): Json {
    const { kind, text, logprobs } = this;
    if (kind === "reasoning") return { type: "reasoning_text", text };
    return { type: "output_text", text, annotations: [], logprobs: [...logprobs] };
  }
}

/** A random id that begins with `prefix`. */
export function newId(prefix: string): string {
  return `${prefix}_${crypto.randomUUID().replaceAll("-", "")}`;
}

/** The records of one response, from the pieces of its answer. `stored`: whether the response is kept. */
export class ResponseRecords {
  readonly #functions: ReturnType<typeof functionsOf>;
  readonly #request: Json;
  readonly #created = now();
  readonly #items: OpenItem[] = [];
  readonly #calls = new Map<number, OpenItem>();
  #open: OpenItem | undefined;
  #reasoned = 0;
  #finish = "stop";
  #sequence = 0;

  constructor(
    readonly id: string,
    private readonly model: string,
    body: Wanted,
    stored: boolean,
    private readonly ids: (prefix: string) => string = newId,
  ) {
    this.#functions = functionsOf(body.tools ?? []);
    this.#request = echo(body, stored);
  }

  /** The events before the first piece. */
  *begin(): Generator<Json> {
    for (const kind of ["created", "in_progress"])
      yield this.#event(`response.${kind}`, { response: this.#record("in_progress", null) });
  }

  /** Adds a piece of the answer, and gives its events. */
  *piece({ reasoning, text = "", logprobs = [], calls = [], finish }: Piece): Generator<Json> {
    if (reasoning) {
      this.#reasoned++;
      yield* this.#grow("reasoning", reasoning, []);
    }
    if (text || logprobs.length) yield* this.#grow("message", text, logprobs);
    for (const call of calls) yield* this.#call(call);
    this.#finish = finish ?? this.#finish;
  }

  /** Ends the answer: its last events; the last one has the whole response. */
  *end(usage: TokenCounts): Generator<Json> {
    yield* this.#close();
    const reason = INCOMPLETE[this.#finish];
    const status = reason === undefined ? "completed" : "incomplete";
    const response = this.#record(status, usage);
    if (reason !== undefined) response.incomplete_details = { reason };
    yield this.#event(`response.${status}`, { response });
  }

  *#grow(kind: "reasoning" | "message", delta: string, logprobs: ChatLogprobs["content"]): Generator<Json> {
    let item = this.#open;
    if (item?.kind !== kind) {
      yield* this.#close();
      item = this.#add(kind);
      const output_index = item.index;
      yield this.#event("response.output_item.added", { output_index, item: item.record() });
      const at = { output_index, item_id: item.id, content_index: 0 };
      yield this.#event("response.content_part.added", { ...at, part: item.part });
    }
    item.text += delta;
    item.logprobs.push(...logprobs);
    const at = { item_id: item.id, output_index: item.index, content_index: 0, delta };
    if (kind === "message") yield this.#event("response.output_text.delta", { ...at, logprobs });
    else yield this.#event("response.reasoning_text.delta", at);
  }

  *#call({ index, id, function: called }: ToolCallDelta): Generator<Json> {
    let item = this.#calls.get(index);
    if (id || !item) {
      yield* this.#close();
      const seen = called?.name ?? "";
      const [namespace, name] = this.#functions.get(seen) ?? [undefined, seen];
      item = this.#add("function_call", { call_id: id ?? "", name, ...(namespace && { namespace }) });
      this.#calls.set(index, item);
      const added = { output_index: item.index, item: item.record() };
      yield this.#event("response.output_item.added", added);
    }
    const delta = called?.arguments ?? "";
    item.text += delta;
    const at = { item_id: item.id, output_index: item.index };
    if (delta) yield this.#event("response.function_call_arguments.delta", { ...at, delta });
  }

  #add(kind: OpenItem["kind"], call?: Json): OpenItem {
    const prefix = { reasoning: "rs", message: "msg", function_call: "fc" }[kind];
    this.#open = new OpenItem(kind, this.#items.length, this.ids(prefix), call);
    this.#items.push(this.#open);
    return this.#open;
  }

  /** Closes the open item: the events with its whole content. */
  *#close(): Generator<Json> {
    const item = this.#open;
    this.#open = undefined;
    if (!item) return;
    const { id: item_id, index: output_index, text, kind } = item;
    const at = { item_id, output_index };
    if (kind === "function_call") {
      const done = { ...at, name: item.call.name, arguments: text };
      yield this.#event("response.function_call_arguments.done", done);
    } else {
      const part = { ...at, content_index: 0 };
      const isMessage = kind === "message";
      yield this.#event(`response.${isMessage ? "output_text" : "reasoning_text"}.done`, {
        ...part,
        text,
        ...(isMessage && { logprobs: item.logprobs }),
      });
      yield this.#event("response.content_part.done", { ...part, part: item.part });
    }
    item.status = INCOMPLETE[this.#finish] ? "incomplete" : "completed";
    yield this.#event("response.output_item.done", { output_index, item: item.record() });
  }

  #record(status: string, usage: TokenCounts | null): Json {
    return {
      id: this.id,
      object: "response",
      created_at: this.#created,
      completed_at: status === "completed" ? now() : null,
      status,
      error: null,
      incomplete_details: null,
      model: this.model,
      output: usage ? this.#items.map((item) => item.record()) : [],
      ...this.#request,
      usage: usage && {
        input_tokens: usage.prompt,
        input_tokens_details: { cached_tokens: usage.cached, cache_write_tokens: 0 },
        output_tokens: usage.completion,
        output_tokens_details: { reasoning_tokens: this.#reasoned },
        total_tokens: usage.prompt + usage.completion,
      },
    };
  }

  #event(type: string, fields: Json): Json {
    return { type, sequence_number: this.#sequence++, ...fields };
  }
}

function now(): number {
  return Math.floor(Date.now() / 1000);
}

/** The fields of a response that repeat its request. */
function echo(body: Wanted, store: boolean): Json {
  return {
    background: false,
    instructions: body.instructions ?? null,
    max_output_tokens: body.max_output_tokens ?? null,
    max_tool_calls: null,
    metadata: body.metadata ?? {},
    parallel_tool_calls: body.parallel_tool_calls !== false,
    previous_response_id: body.previous_response_id ?? null,
    reasoning: { effort: body.reasoning?.effort ?? null, summary: null },
    service_tier: "default",
    store,
    temperature: body.temperature ?? null,
    text: { format: { type: "text" }, ...body.text },
    tool_choice: body.tool_choice ?? "auto",
    tools: body.tools ?? [],
    top_logprobs: body.top_logprobs ?? 0,
    top_p: body.top_p ?? null,
    truncation: "disabled",
    user: body.user ?? null,
  };
}
