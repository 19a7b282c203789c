import type { ChatMessage } from "../src/both/openai.js";

/**
 * The loaded model and its cloud as the page needs them: one answer at a time, as text that arrives in
 * pieces.
 */

import { type Artifacts, findArtifacts } from "../src/both/artifacts.js";
import { createEngine, type Engine, type LoadProgress } from "../src/page/index.js";
import { HybridClient, type KeptState, loadDifficulty, type RouteInfo } from "../src/routing/index.js";
import type { CloudSettings } from "./cloud-settings.js";
import type { Sampling } from "./link.js";

export type Question =
  | { readonly prompt: string }
  | { readonly messages: readonly ChatMessage[]; readonly conversation: string };

/** How an answer ended and what it cost; times in milliseconds. */
export interface Outcome {
  readonly reason: "stop" | "length" | "aborted";
  readonly tokens: number;
  readonly ttft: number | null;
  /** Tokens per second after the first token; null where there were not enough of them. */
  readonly rate: number | null;
}

export interface Listener {
  append(text: string): void;
  route(info: RouteInfo, model: string): void;
}

const STORAGE = "nearfar.routing";
/**
 * A slow processor that stands in for a GPU compiles kernels for minutes; that is no reason to give it up.
 * Seconds.
 */
const PATIENCE = { first_token: 600, between: 60 };
const POLICY = { timeouts: { device_first_token: PATIENCE.first_token, device_between: PATIENCE.between } };

/** The artifact, or those for WebGPU and for WebAssembly. */
export function readArtifacts(artifact: URL): Promise<Artifacts> {
  return findArtifacts(artifact, undefined, {});
}

export class Model {
  readonly client = new HybridClient({
    store: { read: readKept, write: writeKept },
    policy: POLICY,
    onDeviceLost: () => void this.#reload(),
  });
  #engine: Engine | null = null;
  #cloud = "";
  #onProgress: (progress: LoadProgress) => void = () => undefined;

  constructor(private readonly artifact: URL) {
    this.#publish();
    // Only where the page's address asks for it (?difficulty=english): it knows English only, and only a
    // prompt's looks.
    if (new URLSearchParams(location.search).get("difficulty") !== "english") return;
    loadDifficulty(new URL("difficulty.json", location.href)).then(
      (difficulty) => this.client.setDifficulty(difficulty),
      () => undefined,
    );
  }

  /** Loads the model onto this device; `onProgress` hears of later loads too. */
  async load(onProgress: (progress: LoadProgress) => void): Promise<Engine> {
    this.#onProgress = onProgress;
    this.#engine = await createEngine(this.artifact, { onProgress });
    this.client.device = this.#engine;
    this.#publish();
    return this.#engine;
  }

  setCloud({ mode, address, key }: CloudSettings): void {
    this.#cloud = address === "" || mode === "device_only" ? "" : new URL(address).host;
    this.client.setCloud(address === "" ? null : { baseURL: address, ...(key !== "" && { apiKey: key }) });
    this.client.setPolicy({ ...POLICY, mode });
  }

  /** Whether answers can come from elsewhere than this device. */
  get hasCloud(): boolean {
    return this.#cloud !== "";
  }

  /** Who answers, as far as that is known before. */
  get name(): string {
    return this.#engine?.model.name ?? this.#cloud;
  }

  /** Answers; an abort is an outcome. Plain prompts are the device's alone. */
  async answer(
    question: Question,
    sampling: Sampling,
    listener: Listener,
    signal: AbortSignal,
  ): Promise<Outcome> {
    const { temperature, topP, maxTokens, seed } = sampling;
    const options = {
      ...(temperature !== undefined && { temperature }),
      ...(topP !== undefined && { top_p: topP }),
      ...(maxTokens !== undefined && { max_tokens: maxTokens }),
      ...(seed !== undefined && { seed }),
      stream: true as const,
      signal,
    };
    try {
      if ("prompt" in question) return await this.#continue({ ...options, ...question }, listener);
      return await this.#chat(options, question, listener);
    } catch (error) {
      if (!signal.aborted) throw error;
      // What was written until then stays; its cost is not known.
      return { reason: "aborted", tokens: 0, ttft: null, rate: null };
    }
  }

  async #continue(
    request: Parameters<Engine["completions"]["create"]>[0] & { stream: true },
    { append }: Listener,
  ): Promise<Outcome> {
    if (!this.#engine)
      throw new Error("No model is loaded here, and the cloud only chats. Switch off “Continue my text”.");
    let reason: Outcome["reason"] = "stop";
    for await (const chunk of await this.#engine.completions.create(request)) {
      append(chunk.choices[0]?.text ?? "");
      reason = chunk.choices[0]?.finish_reason ?? reason;
    }
    return this.#measured(reason);
  }

  async #chat(
    options: Omit<Parameters<HybridClient["chat"]["completions"]["create"]>[0], "messages">,
    { messages, conversation }: Extract<Question, { conversation: string }>,
    { append, route }: Listener,
  ): Promise<Outcome> {
    const started = performance.now();
    const times: number[] = [];
    const end: { reason: Outcome["reason"]; tokens: number; info: RouteInfo | null } = {
      reason: "stop",
      tokens: 0,
      info: null,
    };
    const request = { ...options, messages, stream: true, stream_options: { include_usage: true } } as const;
    for await (const chunk of await this.client.chat.completions.create({
      ...request,
      x_nearfar: { conversation },
    })) {
      const text = chunk.choices[0]?.delta.content ?? "";
      if (text !== "") times.push(performance.now());
      append(text);
      if (chunk.choices[0]?.finish_reason === "length") end.reason = "length";
      end.tokens = chunk.usage?.completion_tokens ?? end.tokens;
      end.info = chunk.x_nearfar ?? end.info;
      if (chunk.x_nearfar) route(chunk.x_nearfar, chunk.model);
    }
    if (end.info?.path.join() === "device") return this.#measured(end.reason);
    const [first] = times;
    if (first === undefined) return { reason: end.reason, tokens: end.tokens, ttft: null, rate: null };
    const seconds = ((times.at(-1) ?? first) - first) / 1000;
    const rate = seconds > 0 ? (end.tokens - 1) / seconds : null;
    return { reason: end.reason, tokens: end.tokens, ttft: first - started, rate };
  }

  /** By the engine itself, which knows more than the page sees. */
  async #measured(reason: Outcome["reason"]): Promise<Outcome> {
    const last = (await this.#engine?.stats())?.last;
    return {
      reason,
      tokens: last?.completionTokens ?? 0,
      ttft: last?.ttft ?? null,
      rate: last?.decodeTokensPerSecond || null,
    };
  }

  /**
   * After the device was lost: begins anew, from the weights that the browser keeps. Where that fails, the
   * cloud stays.
   */
  async #reload(): Promise<void> {
    const lost = this.#engine;
    if (!lost) return;
    this.#engine = null;
    this.client.device = null;
    await lost.dispose();
    this.#onProgress({ phase: "reopening" });
    const again = await this.load(this.#onProgress).catch(() => null);
    if (again) this.#onProgress({ phase: "reopened", contextLength: again.model.contextLength });
  }

  /** For the browser's console, and for tests. */
  #publish(): void {
    const { client, artifact } = this;
    Object.assign(window, { nearfar: { engine: this.#engine, createEngine, artifact, client } });
  }
}

function readKept(): KeptState | null {
  try {
    return JSON.parse(localStorage.getItem(STORAGE) ?? "null") as KeptState | null;
  } catch {
    return null;
  }
}

function writeKept(state: KeptState): void {
  try {
    localStorage.setItem(STORAGE, JSON.stringify(state));
  } catch {
    // Storage that is full or forbidden: budgets and speeds hold for this visit.
  }
}
