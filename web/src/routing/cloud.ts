/** The cloud: any server with OpenAI's interface. */

import { CloudError, RequestError, throwIfAborted } from "../protocol/errors.js";
import { pieceIn } from "./chunks.js";
import { type ChunkContents, ends, isUseful } from "./leg.js";
import type { HybridRequest } from "./openai.js";
import type { Timeouts } from "./policy.js";
import { events, textOf } from "./sse.js";
import type { Feature } from "./types.js";
import { within } from "./wait.js";

/** The cloud's address and credentials. */
export interface CloudOptions {
  /**
   * The address as OpenAI's clients take it, for example `https://host/v1`; `/v1` may be left out unless
   * there is another path.
   */
  readonly baseURL: string;
  readonly apiKey?: string;
  /** The server's name of the model; by default the first that it lists. */
  readonly model?: string;
  readonly headers?: Readonly<Record<string, string>>;
  /**
   * Whether the server continues an answer that was begun elsewhere (`continue_final_message`: nearfar and
   * vLLM do).
   */
  readonly continues?: boolean;
  /** Most tokens of prompt and answer together; unknown by default. */
  readonly context?: number;
  /** Features of the server; all by default. */
  readonly features?: readonly Feature[];
  /** Seconds that the server's cache keeps a conversation; 300 by default. */
  readonly cache_seconds?: number;
  /** Price per million tokens, in the unit of the policy's budgets. */
  readonly price_in?: number;
  readonly price_out?: number;
  /** Replaces the global fetch. */
  readonly fetch?: typeof fetch;
}

export const ALL_FEATURES: readonly Feature[] = [
  "tools",
  "json_schema",
  "json_object",
  "grammar",
  "images",
  "logprobs",
  "reasoning",
];

const HERE = globalThis.location?.href;

/** Statuses of a wrong request, independent of the server, the key or the moment. */
const REFUSED = [400, 413, 422];

export class Cloud {
  readonly #root: string;
  readonly #loopback: boolean;
  #model: string | null;

  constructor(
    readonly options: CloudOptions,
    private readonly timeouts: Timeouts,
  ) {
    const url =
      typeof options.baseURL === "string" && options.baseURL !== "" && URL.canParse(options.baseURL, HERE)
        ? new URL(options.baseURL, HERE)
        : null;
    if (!url || !/^https?:$/.test(url.protocol))
      throw new RequestError(`baseURL is ${options.baseURL}; give an http or https address`, "baseURL");
    this.#root = `${url.origin}${url.pathname === "/" ? "/v1" : url.pathname.replace(/\/+$/, "")}`;
    this.#loopback = /^(localhost|127(\.\d+){3}|\[::1\])$/.test(url.hostname);
    this.#model = options.model || null;
  }

  /** Whether the server is on this machine, and so reachable without a network. */
  get local(): boolean {
    return this.#loopback;
  }

  get continues(): boolean {
    return this.options.continues ?? true;
  }

  /**
   * Yields the answer's pieces. Throws RequestError where the server rejects the request, CloudError where it
   * fails or its stream ends early, or the signal's reason.
   */
  async *stream(request: HybridRequest, signal: AbortSignal): AsyncGenerator<ChunkContents> {
    const { signal: _, ...fields } = request;
    const model = this.#model ?? fields.model ?? (await this.#firstModel(signal));
    const body = {
      ...fields,
      ...(fields.continue_final_message && { add_generation_prompt: false }),
      model,
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await this.#fetch("/chat/completions", signal, JSON.stringify(body));
    if (!response.body) throw new CloudError("The cloud's answer is empty.", "shape");
    yield* this.#pieces(response.body, signal);
  }

  async *#pieces(body: ReadableStream<Uint8Array>, signal: AbortSignal): AsyncGenerator<ChunkContents> {
    let complete = false;
    const records = events(body);
    let limit = this.timeouts.first_token;
    try {
      for (;;) {
        const late = (): Error => new CloudError(`The cloud sent nothing for ${limit} s.`, "timeout");
        const { done, value } = await within(records.next(), limit, late, signal);
        if (done) break;
        const piece = pieceIn(value);
        complete ||= ends(piece);
        if (piece.choices.some(isUseful)) limit = this.timeouts.between;
        yield piece;
      }
    } catch (error) {
      throwIfAborted(signal);
      if (error instanceof CloudError) throw error;
      throw new CloudError(`The cloud's stream was cut: ${said(error)}`, "cut", { cause: error });
    }
    throwIfAborted(signal);
    // A cut connection can end like a finished one.
    if (!complete) throw new CloudError("The cloud's stream ended before its answer did.", "cut");
  }

  async #firstModel(signal: AbortSignal): Promise<string> {
    const response = await this.#fetch("/models", signal);
    const id = firstId(await textOf(response.body, 1 << 22).catch(() => ""));
    if (typeof id !== "string")
      throw new CloudError(
        `${this.#root}/models lists no model. Name one (model), or correct the address.`,
        "shape",
      );
    this.#model = id;
    return id;
  }

  async #fetch(path: string, signal: AbortSignal, body?: string): Promise<Response> {
    const { apiKey, headers, fetch: own } = this.options;
    const sent = (own ?? globalThis.fetch)(this.#root + path, {
      method: body === undefined ? "GET" : "POST",
      headers: {
        ...(body !== undefined && { "content-type": "application/json" }),
        ...(apiKey && { authorization: `Bearer ${apiKey}` }),
        ...headers,
      },
      ...(body !== undefined && { body }),
      // A redirect could send key and prompt to a server that nobody chose.
      redirect: "error",
      credentials: "omit",
      cache: "no-store",
      signal,
    });
    // The headers come at once; the prefill delays the first token, not the headers.
    const seconds = this.timeouts.connect + (body === undefined ? 0 : this.timeouts.first_token);
    let response: Response;
    try {
      response = await within(
        sent,
        seconds,
        () => new CloudError(`The cloud did not answer for ${seconds} s.`, "timeout"),
      );
    } catch (error) {
      throwIfAborted(signal);
      if (error instanceof CloudError) throw error;
      // A browser gives the same error for a server that is down and for one that does not allow this page.
      const hint = globalThis.location ? ". Does it allow this page's origin (nearfar serve --cors)?" : "";
      const message = `The cloud at ${this.#root} cannot be reached: ${said(error)}${hint}`;
      throw new CloudError(message, "connection", { cause: error });
    }
    if (response.ok) return response;
    throw await refusal(response, this.#root);
  }
}

/** Converts an error response: the request is wrong, or the cloud cannot answer it (now). */
async function refusal(response: Response, root: string): Promise<Error> {
  const text = await textOf(response.body).catch(() => "");
  let message = text.slice(0, 200) || response.statusText;
  let param: string | null = null;
  try {
    const { error } = JSON.parse(text) as { error?: { message?: unknown; param?: unknown } };
    if (typeof error?.message === "string") message = error.message.slice(0, 2000);
    if (typeof error?.param === "string") param = error.param;
  } catch {
    // Not every server speaks JSON when it fails.
  }
  const { status, headers } = response;
  if (REFUSED.includes(status)) return new RequestError(`The cloud rejects the request: ${message}`, param);
  const advice = status < 500 ? "Is its address (baseURL) right, and its key (apiKey)?" : "Try again later.";
  const said = `The cloud at ${root} answered with status ${status}: ${message}`;
  return new CloudError(status === 429 ? said : `${said.replace(/[.\s]*$/, ".")} ${advice}`, String(status), {
    retryAfter: retryAfter(headers.get("retry-after")),
  });
}

/** Parses Retry-After, a number or a date, to seconds. */
export function retryAfter(header: string | null, now = Date.now()): number | null {
  if (header === null || header.trim() === "") return null;
  const seconds = Number(header);
  if (Number.isFinite(seconds)) return Math.max(seconds, 0);
  const date = Date.parse(header);
  return Number.isNaN(date) ? null : Math.max((date - now) / 1000, 0);
}

function firstId(text: string): unknown {
  try {
    return (JSON.parse(text) as { data?: { id?: unknown }[] } | null)?.data?.[0]?.id;
  } catch {
    return null;
  }
}

function said(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
