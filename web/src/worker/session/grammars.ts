/** The engine's side of the connection to the worker that follows grammars. */

import { inThread } from "../../grammar/in-thread.js";
import type { FromGrammars, GrammarPort, ToGrammars } from "../../grammar/words.js";
import { RequestError, throwIfAborted } from "../../protocol/errors.js";
import type { Grammar } from "../../protocol/grammar.js";
import type { Constraint } from "../engine/request.js";
import type { StartGrammars } from "../host.js";

/** Milliseconds that a worker may take to load its code and read the vocabulary: a dead one sends nothing. */
const START_LIMIT_MS = 120_000;
/** Milliseconds that a grammar may take to compile, or a token to be followed. */
const LIMIT_MS = 10_000;
/**
 * Milliseconds that either may continue after its answer is no longer wanted. Most have finished by then, and
 * a new worker would have to load the library and compile the grammars of all other answers again.
 */
const LEFT_MS = 200;

/** The facts about a model that the worker needs. */
export interface Vocabulary {
  readonly size: number;
  /** Returns null for a token that no text has. */
  readonly bytesOf: (token: number) => Uint8Array | null;
  readonly ends: readonly number[];
}

/** Uses one worker at a time, with one request at a time, so that it is clear which took too long. */
export class Grammars {
  #line: Promise<Line> | null = null;
  #turn: Promise<unknown> = Promise.resolve();
  #nextId = 1;
  /** The answer whose request the worker is processing. */
  #asked: { readonly way: Way; readonly line: Line } | null = null;

  constructor(
    private readonly start: StartGrammars | null,
    private readonly vocabulary: Vocabulary,
    private readonly limitMs = LIMIT_MS,
  ) {}

  /**
   * One answer's way through a grammar, which `signal` closes. RequestError where the grammar cannot be followed;
   * the reason of `signal` where the answer is not wanted any more. `ignoreEos`: the answer ends only where the
   * grammar allows nothing else.
   */
  async follow(grammar: Grammar, signal?: AbortSignal, ignoreEos = false): Promise<Constraint> {
    throwIfAborted(signal);
    const way = new Way(this, grammar, this.#nextId++, ignoreEos);
    signal?.addEventListener("abort", () => way.close(), { once: true });
    const allowed = await this.next(way);
    throwIfAborted(signal);
    if (!allowed) throw new RequestError("the grammar allows nothing but an empty answer", paramOf(grammar));
    return Object.assign(way, { allowed });
  }

  /** Follows `count` answers from the start of a grammar. */
  async followEach(
    grammar: Grammar,
    count: number,
    signal: AbortSignal,
    ignoreEos: boolean,
  ): Promise<Constraint[]> {
    // The first answer compiles the grammar, or is rejected.
    const first = await this.follow(grammar, signal, ignoreEos);
    const others = Array.from({ length: count - 1 }, () => this.follow(grammar, signal, ignoreEos));
    return [first, ...(await Promise.all(others))];
  }

  /** The tokens that may follow the tokens of a way; null if none may. */
  next(way: Way): Promise<Uint32Array<ArrayBuffer> | null> {
    const next = this.#turn.then(() => this.#next(way));
    this.#turn = next.catch(() => undefined);
    return next;
  }

  async #next(way: Way): Promise<Uint32Array<ArrayBuffer> | null> {
    if (way.closed) return null;
    if (!this.start) throw cannotLoad(paramOf(way.grammar));
    this.#line ??= this.#open(this.start, paramOf(way.grammar));
    const line = await this.#line;
    if (way.closed) return null;
    this.#asked = { way, line };
    const answer = await line.ask(way.word(line), this.limitMs);
    this.#asked = null;
    switch (answer.type) {
      case "allowed":
        return answer.words;
      case "refused":
        if (!answer.broken) throw new RequestError(answer.message, paramOf(way.grammar));
        await this.end();
        throw new RequestError(
          `the ${kindOf(way.grammar)} cannot be followed: ${answer.message}`,
          paramOf(way.grammar),
        );
      case "late":
        await this.end();
        if (way.closed) return null;
        throw new RequestError(
          `the ${kindOf(way.grammar)} took longer than ${this.limitMs / 1000} s to compile or to follow; ` +
            "make it simpler",
          paramOf(way.grammar),
        );
      case "failed":
        await this.end();
        throw failed(answer, paramOf(way.grammar));
      default:
        return null;
    }
  }

  /** Records that the next message for a way is no longer awaited. */
  left(way: Way): void {
    if (this.#asked?.way === way) this.#asked.line.hurry(LEFT_MS);
  }

  /** Opens a worker that knows the vocabulary. Pending answers continue in it from their tokens. */
  async #open(start: StartGrammars, param: string): Promise<Line> {
    const { size, bytesOf, ends: known } = this.vocabulary;
    let line: Line | null = null;
    try {
      await null; // `#line` is this promise before anything can fail
      // Without an end token a grammar that may be empty would be at its end before the first token.
      const silent = Array.from({ length: known.length > 0 ? 0 : size }, (_, token) =>
        bytesOf(token),
      ).indexOf(null);
      const ends = known.length > 0 ? known : [silent < 0 ? size - 1 : silent];
      const started = start();
      line = new Line("post" in started ? started : inThread(started));
      const pieces = Array.from({ length: size }, (_, token) => written(bytesOf(token)));
      const answer = await line.ask({ type: "vocabulary", pieces, ends }, START_LIMIT_MS);
      if (answer.type === "ready") return line;
      throw failed(answer, param);
    } catch (error) {
      // The next request starts a new worker.
      this.#line = null;
      line?.end();
      throw error;
    }
  }

  /** Ends the worker; the next request starts another. */
  async end(): Promise<void> {
    const line = this.#line;
    this.#line = null;
    await line?.then(
      (opened) => opened.end(),
      () => undefined,
    );
  }
}

class Way implements Constraint {
  allowed: Uint32Array<ArrayBuffer> = new Uint32Array();
  closed = false;
  readonly #tokens: number[] = [];
  #line: Line | null = null;

  constructor(
    private readonly grammars: Grammars,
    readonly grammar: Grammar,
    private readonly id: number,
    private readonly ignoreEos: boolean,
  ) {}

  accept(token: number): Promise<Uint32Array<ArrayBuffer> | null> {
    this.#tokens.push(token);
    return this.grammars.next(this);
  }

  close(): void {
    if (this.closed) return;
    this.closed = true;
    this.grammars.left(this);
    this.#line?.tell({ type: "close", id: this.id });
  }

  /** The message for a worker: a new one needs the whole state. */
  word(line: Line): ToGrammars {
    const { id, grammar, ignoreEos } = this;
    const token = this.#tokens.at(-1);
    if (this.#line === line && token !== undefined) return { type: "accept", id, token };
    this.#line = line;
    return { type: "start", id, grammar, ignoreEos, tokens: [...this.#tokens] };
  }
}

/** The connection to one worker. */
class Line {
  #answer: (word: FromGrammars) => void = () => undefined;
  /** Gives the question in progress `ms` more milliseconds. */
  #late: (ms: number) => void = () => undefined;

  constructor(private readonly port: GrammarPort) {
    port.listen((word) => this.#answer(word));
  }

  tell(word: ToGrammars): void {
    this.port.post(word);
  }

  /** Asks the worker and returns its answer; "late" if it takes longer than `limitMs`. */
  ask(word: ToGrammars, limitMs?: number): Promise<FromGrammars | { readonly type: "late" }> {
    return new Promise((resolve) => {
      let timer: ReturnType<typeof setTimeout> | undefined;
      this.#late = (ms) => {
        clearTimeout(timer);
        timer = setTimeout(() => resolve({ type: "late" }), ms);
      };
      if (limitMs !== undefined) this.#late(limitMs);
      this.#answer = (answer) => {
        clearTimeout(timer);
        resolve(answer);
      };
      this.port.post(word);
    });
  }

  /** Makes the question in progress late after `ms`, unless it is answered. */
  hurry(ms: number): void {
    this.#late(ms);
  }

  end(): void {
    this.port.end();
  }
}

function failed(answer: FromGrammars | { readonly type: "late" }, param: string): RequestError {
  const [message, code] =
    answer.type === "failed"
      ? [answer.message, answer.code]
      : ["its worker did not start", "unsupported" as const];
  return new RequestError(`${param} cannot be followed here: ${message}`, param, { code });
}

function cannotLoad(param: string): RequestError {
  return new RequestError(
    `${param} needs code that a service worker cannot load later. Give createEngine (or shareEngine) of ` +
      "nearfar/here the option grammars: import { grammars } from nearfar/here/grammars.",
    param,
    { code: "unsupported" },
  );
}

function paramOf({ param = "response_format" }: Grammar): string {
  return param;
}

function kindOf({ kind }: Grammar): string {
  return kind === "ebnf" ? "grammar" : kind.replace("_", " ");
}

/** Bytes as byte-level tokenizers write them: printable characters as themselves, others from U+0100 on. */
function written(bytes: Uint8Array | null): string {
  return Array.from(bytes ?? [], (byte) => LETTERS[byte]).join("");
}

const LETTERS = ((): readonly string[] => {
  let others = 0;
  return Array.from({ length: 256 }, (_, byte) => {
    const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    return String.fromCharCode(printable ? byte : 256 + others++);
  });
})();
