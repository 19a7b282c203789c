import { TOP_LOGPROBS } from "../../format/constants.js";
import { RequestError, toErrorRecord } from "../../protocol/errors.js";
import type { AnswerEvent, PromptReading, RequestStats } from "../../protocol/messages.js";
import type { HostArray } from "../engine/backend.js";
import type { EngineCore } from "../engine/engine-core.js";
import type { Request, Scored } from "../engine/request.js";
import type { SamplingParams } from "../engine/sampling.js";

/** The last positions of a prompt of which some are scored; edge_runtime/openai/knowledge.py has the same number. */
const LAST_ROWS = 64;

/** What a model says of a prompt when it has read it, before it answers. Logarithms are natural. */
export class PromptScores implements Scored {
  /** Log-probabilities of the likeliest first tokens of the answer, in descending order. */
  top: readonly number[] = [];
  /** Log-probabilities of the tokens that were asked for, as the first token. */
  logprobs: readonly number[] = [];
  /** Log-probabilities of tokens of the prompt. */
  readonly #own: number[] = [];
  readonly #last: number;

  constructor(
    private readonly prompt: readonly number[],
    private readonly asked: PromptReading,
  ) {
    this.#last = prompt.length - 1;
  }

  /** The mean log-probability of some of the prompt's last tokens; null if none was computed. */
  get promptLogprob(): number | null {
    return this.#own.length > 0 ? this.#own.reduce((sum, each) => sum + each, 0) / this.#own.length : null;
  }

  /**
   * The last position is needed, so a chunk ends before it if there is no room. Positions before it share what
   * room is left evenly, as in edge_runtime/engine/row_scores.py.
   */
  rows(start: number, count: number, room: number): readonly [count: number, positions: readonly number[]] {
    const needed = start + count > this.#last;
    if (needed && room < 1) return [this.#last - start, []];
    const end = Math.min(start + count, this.#last);
    const first = this.asked.perplexity ? Math.max(start, this.#last - LAST_ROWS) : end;
    const spare = room - Number(needed);
    const step = Math.ceil((end - first) / spare);
    const positions: number[] = [];
    for (let position = first; spare > 0 && position < end; position += step) positions.push(position);
    return [count, needed ? [...positions, this.#last] : positions];
  }

  take(position: number, logits: HostArray): boolean {
    if (!logits.every(Number.isFinite)) return false;
    const top = likeliest(logits);
    const best = top[0] ?? 0;
    let sum = 0;
    for (const value of logits) sum += Math.exp(value - best);
    const logSum = best + Math.log(sum);
    const of = (token: number): number => (logits[token] ?? 0) - logSum;
    if (position < this.#last) this.#own.push(of(this.prompt[position + 1] ?? 0));
    else {
      this.top = top.map((value) => value - logSum);
      this.logprobs = this.asked.tokens.map(of);
    }
    return true;
  }
}

/** The greatest values, in descending order. */
function likeliest(logits: HostArray): number[] {
  const top: number[] = [];
  for (const value of logits) {
    if (top.length === TOP_LOGPROBS && value <= (top.at(-1) ?? 0)) continue;
    const at = top.findIndex((other) => other < value);
    top.splice(at < 0 ? top.length : at, 0, value);
    if (top.length > TOP_LOGPROBS) top.pop();
  }
  return top;
}

/** Starts to read a prompt, and tells what it shows. The prompt stays in the cache until it is cancelled. */
export function readPrompt(
  core: EngineCore,
  prompt: readonly number[],
  asked: PromptReading,
  params: SamplingParams,
  vocabSize: number,
  tell: (event: AnswerEvent) => void,
  onFail: () => void,
): Request {
  const alien = asked.tokens.find((token) => !Number.isInteger(token) || token < 0 || token >= vocabSize);
  if (alien !== undefined)
    throw new RequestError(`token id ${alien} is outside the vocabulary of ${vocabSize} tokens`, "tokens");
  const scores = new PromptScores(prompt, asked);
  const listener = {
    token: () => false,
    finish: (_reason: unknown, stats: RequestStats) => {
      const { top, logprobs, promptLogprob } = scores;
      tell({ event: "read", top, logprobs, promptLogprob, stats });
    },
    fail: (error: Error) => {
      onFail();
      tell({ event: "error", error: toErrorRecord(error) });
    },
  };
  return core.submit(prompt, { ...params, maxTokens: 1 }, listener, null, scores);
}
