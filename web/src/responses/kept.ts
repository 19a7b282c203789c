/** Keeps the newest responses in memory, for `previous_response_id` and items by reference. */

import { RequestError } from "../protocol/errors.js";
import type { MessageParam } from "../protocol/openai.js";
import { messagesOf } from "./asking.js";
import { newId } from "./shape.js";
import type { OutputItem, ResponseItem, ResponseRecord, Wanted } from "./types.js";

/** The most responses, and characters of them, that an engine keeps. */
const MOST = 64;
const MOST_CHARACTERS = 4 << 20;

interface KeptResponse {
  readonly items: readonly ResponseItem[];
  readonly messages: readonly MessageParam[];
  readonly size: number;
}

/** The responses of one engine. */
export class KeptResponses {
  readonly #responses = new Map<string, KeptResponse>();
  #size = 0;

  /** Keeps a response to a request. `before`: the messages of the responses that it continues. */
  keep(record: ResponseRecord, { input }: Wanted, before: readonly MessageParam[]): void {
    const output = record.output.map(bare);
    const given: readonly ResponseItem[] = typeof input === "object" ? input : [];
    const messages = [...before, ...messagesOf(input), ...messagesOf(output)];
    const named = given.map((item) => ({ id: newId("item"), ...item }) as ResponseItem);
    const items = [
      ...named,
      ...output.map((item, at) => ({ ...item, id: record.output[at]?.id }) as ResponseItem),
    ];
    const size = JSON.stringify([record, items, messages]).length;
    if (size > MOST_CHARACTERS) return;
    this.#responses.set(record.id, { items, messages, size });
    this.#size += size;
    for (const [id, oldest] of this.#responses) {
      if (this.#responses.size <= MOST && this.#size <= MOST_CHARACTERS) return;
      this.#responses.delete(id);
      this.#size -= oldest.size;
    }
  }

  /** The conversation of `previous_response_id`; none without an id. */
  messages(id: string | undefined): readonly MessageParam[] {
    if (id === undefined) return [];
    const found = this.#responses.get(id);
    if (!found) throw missing("response", id, "previous_response_id");
    return found.messages;
  }

  /** A request whose references are replaced by the items that they name. */
  resolved(body: Wanted): Wanted {
    const { input } = body;
    if (typeof input !== "object") return body;
    return {
      ...body,
      input: input.map((item) => (item.type === "item_reference" ? this.#item(item.id) : item)),
    };
  }

  #item(id: string): ResponseItem {
    for (const { items } of this.#responses.values()) {
      const found = items.find((item) => item.id === id);
      if (found) return found;
    }
    throw missing("item", id, "input");
  }
}

function missing(what: string, id: string, param: string): RequestError {
  const why = `the newest ${MOST} responses are kept in memory until the page is left, unless store was false`;
  return new RequestError(
    `there is no ${what} ${JSON.stringify(id).slice(0, 80)} here: ${why}; send the whole conversation as input`,
    param,
  );
}

/** An item of an answer in the form of a request: without id, status, annotations and log-probabilities. */
function bare({ id: _id, status: _status, ...item }: OutputItem): ResponseItem {
  if (item.type === "function_call") return item;
  const content = item.content.map(({ type, text }) => ({ type, ...(text !== undefined && { text }) }));
  return { ...item, content };
}
