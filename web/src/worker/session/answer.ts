import { toErrorRecord } from "../../protocol/errors.js";
import type { AnswerEvent, AnswerPart, RequestStats, TokenScore } from "../../protocol/messages.js";
import { hasMore } from "../../protocol/messages.js";
import type { RequestListener, TokenLogprobs } from "../engine/request.js";
import type { Asked } from "../prompts/prompts.js";
import type { TextCodec } from "../text/types.js";

/** Collects the choices of one request and tells their text. */
export class Answer {
  readonly #finished: RequestStats[] = [];

  constructor(
    private readonly codec: TextCodec,
    private readonly asked: Asked,
    private readonly n: number,
    private readonly tell: (event: AnswerEvent) => void,
    private readonly onEnd: (stats: RequestStats | null) => void,
  ) {}

  /** Tells that the request is valid. */
  begin(): void {
    this.tell({ event: "accepted" });
    const { echo } = this.asked;
    for (let index = 0; echo !== null && index < this.n; index++)
      this.tell({ event: "delta", index, text: echo, score: null });
  }

  /** Tells the whole answer of a request for the prompt alone. */
  echoed(): void {
    this.begin();
    for (let index = 0; index < this.n; index++)
      this.tell({ event: "finish", index, text: "", reason: "length" });
    const { length } = this.asked.tokens;
    this.#finished.push({ promptTokens: length, cachedTokens: 0, completionTokens: 0, ttft: 0, decode: 0 });
    this.#end();
  }

  choice(index: number): RequestListener {
    const stream = this.asked.stream();
    const reader = this.asked.reader();
    const begins = [...(this.asked.echo ?? "")].length;
    let stopped = false;
    return {
      token: (token, logprobs) => {
        const score = logprobs && this.#score(token, logprobs, begins + stream.length);
        const delta = stream.push(token);
        stopped = delta.stopped;
        this.#deltas(index, reader ? reader.push(delta.text) : [{ text: delta.text }], score);
        return !stopped;
      },
      finish: (reason, stats) => {
        const text = stopped ? "" : stream.flush();
        const last = reader ? reader.finish(text, reason) : { pieces: [{ text }], reason };
        this.#deltas(index, last.pieces.slice(0, -1), null);
        this.tell({ event: "finish", index, text: "", ...last.pieces.at(-1), reason: last.reason });
        this.#finished.push(stats);
        if (this.#finished.length === this.n) this.#end();
      },
      fail: (error) => {
        this.onEnd(null);
        this.tell({ event: "error", error: toErrorRecord(error) });
      },
    };
  }

  #deltas(index: number, pieces: readonly AnswerPart[], score: TokenScore | null): void {
    for (const [at, piece] of pieces.entries()) {
      const own = at === 0 ? score : null;
      if (hasMore(piece) || own) this.tell({ event: "delta", index, ...piece, score: own });
    }
  }

  #end(): void {
    const [first] = this.#finished;
    if (!first) return;
    const completionTokens = this.#finished.reduce((sum, stats) => sum + stats.completionTokens, 0);
    const stats = { ...first, completionTokens };
    this.onEnd(first);
    this.tell({ event: "end", stats });
  }

  #score(token: number, { logprob, top }: TokenLogprobs, offset: number): TokenScore {
    const text = (id: number): string => this.codec.tokenText(id);
    return {
      token: text(token),
      logprob,
      offset,
      top: top.map((other) => ({ token: text(other.token), logprob: other.logprob })),
    };
  }
}
