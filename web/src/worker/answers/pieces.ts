import type { AnswerPart, CallPart } from "../../protocol/messages.js";
import type { FinishReason } from "../../protocol/openai.js";
import type { AnswerReader, Fragment } from "./reader.js";

type Pieces = readonly [AnswerPart, ...AnswerPart[]];

/**
 * Turns the text of one answer into pieces of a reply. Calls get numbers and ids, and a piece has at most one part of
 * a call.
 */
export class PieceReader {
  #index = -1;
  /** The number of complete calls so far. */
  #whole = 0;

  constructor(private readonly reader: AnswerReader) {}

  push(text: string): Pieces {
    return this.#piecesOf(this.reader.push(text));
  }

  /** Ends the answer with its last text. */
  finish(text: string, reason: FinishReason): { readonly pieces: Pieces; readonly reason: FinishReason } {
    const pieces = this.#piecesOf([...this.reader.push(text), ...this.reader.finish(reason === "length")]);
    return { pieces, reason: reason === "stop" && this.#whole > 0 ? "tool_calls" : reason };
  }

  #piecesOf(fragments: readonly Fragment[]): Pieces {
    const [first = { text: "" }, ...others] = this.#joined(fragments);
    return [first, ...others];
  }

  #joined(fragments: readonly Fragment[]): AnswerPart[] {
    const made: AnswerPart[] = [];
    for (const { kind, text } of fragments) {
      const last = made.at(-1);
      if (kind === "called") this.#whole++;
      else if (kind === "call") made.push({ text: "", call: this.#begun(text) });
      else if (kind === "arguments") {
        const isMore = last?.call && !("id" in last.call);
        const before = isMore ? (made.pop()?.call?.function.arguments ?? "") : "";
        made.push({ text: "", call: { index: this.#index, function: { arguments: before + text } } });
      } else {
        if (last && !last.call) made.pop();
        const before: AnswerPart = last?.call ? { text: "" } : (last ?? { text: "" });
        made.push({ ...before, [kind]: (before[kind] ?? "") + text });
      }
    }
    return made;
  }

  #begun(name: string): CallPart {
    return { index: ++this.#index, id: newId(), type: "function", function: { name, arguments: "" } };
  }
}

function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `call_${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
