/** The loaded model and its cloud for the page: one answer at a time, as text that arrives in pieces. */

import { type Artifacts, findArtifacts } from "../src/artifact/artifacts.js";
import { createEngine, type Engine, type LoadProgress } from "../src/page/index.js";
import type { ChatMessage } from "../src/protocol/openai.js";
import { HybridClient, type KeptState, loadDifficulty } from "../src/routing/index.js";
import type { Mode } from "../src/routing/types.js";
import { keptManifest } from "../src/storage/file-cache.js";
import { messagesOfCalls } from "./chats.js";
import type { CloudSettings } from "./cloud-settings.js";
import type { Sampling } from "./link.js";
import type { Format } from "./settings.js";
import { call, OFFERED } from "./tools.js";
import { type Listener, type Outcome, Written } from "./written.js";

export type Question =
  | { readonly prompt: string }
  | {
      readonly messages: readonly ChatMessage[];
      readonly conversation: string;
      readonly format: Format | null;
      /** Whether the page's tools may be called. */
      readonly tools: boolean;
    };

type ChatOptions = Parameters<HybridClient["chat"]["completions"]["create"]>[0];

const STORAGE = "nearfar.routing";
/** Rounds of calls after which an answer must be text. */
const MOST_ROUNDS = 4;
/**
 * Seconds to wait for the device. A slow software GPU compiles kernels for minutes, which is not a reason to
 * give it up.
 */
const PATIENCE = { first_token: 600, between: 60 };
const POLICY = { timeouts: { device_first_token: PATIENCE.first_token, device_between: PATIENCE.between } };

/** Reads the manifest of the artifact, or those for WebGPU and for WebAssembly. */
export function readArtifacts(artifact: URL): Promise<Artifacts> {
  return findArtifacts(artifact, undefined, { kept: keptManifest });
}

export class Model {
  readonly client = new HybridClient({
    store: { read: readKept, write: writeKept },
    policy: POLICY,
    onDeviceLost: () => void this.#reload(),
  });
  #engine: Engine | null = null;
  /** The cloud's address; empty where none is set. */
  #cloud = "";
  #mode: Mode = "auto";
  #artifact: URL | null = null;
  #onProgress: (progress: LoadProgress) => void = () => undefined;

  constructor() {
    this.#publish();
    // Only where the page's address requests it (?difficulty=english): the model knows only English, and only
    // surface features of a prompt.
    if (new URLSearchParams(location.search).get("difficulty") !== "english") return;
    loadDifficulty(new URL("difficulty.json", location.href)).then(
      (difficulty) => this.client.setDifficulty(difficulty),
      () => undefined,
    );
  }

  /** Loads the model onto this device. `onProgress` is also called for later loads. */
  async load(artifact: URL, onProgress: (progress: LoadProgress) => void): Promise<Engine> {
    this.#artifact = artifact;
    this.#onProgress = onProgress;
    this.#engine = await createEngine(artifact, { onProgress });
    this.client.device = this.#engine;
    this.#publish();
    return this.#engine;
  }

  setCloud({ mode, address, key }: CloudSettings): void {
    this.#cloud = address === "" ? "" : new URL(address).host;
    this.#mode = mode;
    this.client.setCloud(address === "" ? null : { baseURL: address, ...(key !== "" && { apiKey: key }) });
    // Without a cloud the choice of mode is hidden: an earlier choice must not leave nobody to answer.
    this.client.setPolicy({ ...POLICY, mode: this.hasCloud ? mode : "auto" });
  }

  /** The engine; null until it is loaded, and while a lost one is loaded again. */
  get engine(): Engine | null {
    return this.#engine;
  }

  /** Whether a cloud is set, even where the mode does not use it. */
  get hasCloud(): boolean {
    return this.#cloud !== "";
  }

  /** Whether answers can come from the cloud. */
  get canLeave(): boolean {
    return this.hasCloud && this.#mode !== "device_only";
  }

  /** Whether requests for JSON can be answered. */
  get canFormat(): boolean {
    return this.canLeave || this.#engine?.model.features.includes("json_schema") === true;
  }

  /** Whether offered tools can be called. */
  get canCall(): boolean {
    return this.canLeave || this.#engine?.model.features.includes("tools") === true;
  }

  /** The name of the model that will answer, if known. */
  get name(): string {
    return this.#engine?.model.name ?? this.#cloud;
  }

  /** Answers a question; an abort is a normal outcome. Plain prompts go to the device only. */
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
      // The text so far stays; its cost is unknown.
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
    options: Omit<ChatOptions, "messages">,
    question: Extract<Question, { conversation: string }>,
    listener: Listener,
  ): Promise<Outcome> {
    const written = new Written();
    const { conversation, format, tools } = question;
    let messages = question.messages;
    for (let round = 0; ; round++) {
      const request = {
        ...(await this.#fitting(options, messages, tools)),
        ...(format && { response_format: { ...format } }),
        ...(tools && { tools: OFFERED, tool_choice: round < MOST_ROUNDS ? "auto" : "none" }),
        messages,
        stream: true,
        stream_options: { include_usage: true },
        x_nearfar: { conversation },
      } as const;
      const calls = await written.read(await this.client.chat.completions.create(request), listener);
      if (calls.length === 0) break;
      const made = calls.map(call);
      listener.called(made);
      messages = [...messages, ...messagesOfCalls(made)];
    }
    return written.isOfDevice ? this.#measured(written.reason) : written.outcome;
  }

  /**
   * Limits the answer to the rest of the context where nobody else could answer: a shorter answer is better
   * than none.
   */
  async #fitting<O extends Pick<ChatOptions, "max_tokens">>(
    options: O,
    messages: readonly ChatMessage[],
    tools: boolean,
  ): Promise<O> {
    const engine = this.#engine;
    if (this.canLeave || !engine || options.max_tokens == null) return options;
    const taken = await engine.countTokens(messages, tools ? { tools: OFFERED } : {}).catch(() => 0);
    const left = roomFor(engine.model.contextLength, taken);
    return left < 1 ? options : { ...options, max_tokens: Math.min(options.max_tokens, left) };
  }

  /** The outcome as measured by the engine, which knows more than the page. */
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
   * Loads a lost device again, from the weights that the browser stores. Where that fails, the cloud remains.
   */
  async #reload(): Promise<void> {
    const [lost, artifact] = [this.#engine, this.#artifact];
    if (!lost || !artifact) return;
    this.#engine = null;
    this.client.device = null;
    await lost.dispose();
    this.#onProgress({ phase: "reopening" });
    const again = await this.load(artifact, this.#onProgress).catch(() => null);
    if (again) this.#onProgress({ phase: "reopened", contextLength: again.model.contextLength });
  }

  /**
   * Publishes the model for tests, which put `nearfar` on the window before the page begins. Other pages get
   * nothing.
   */
  #publish(): void {
    if (!("nearfar" in window)) return;
    const published = { engine: this.#engine, createEngine, artifact: this.#artifact, client: this.client };
    Object.assign(window, { nearfar: published });
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

/** Tokens of difference in counting, from a template's ends of turns. */
const MARGIN = 16;

/** Tokens that an answer can have after a prompt of `prompt` tokens; below 1 there is no room. */
export function roomFor(context: number, prompt: number): number {
  return context - prompt - MARGIN;
}
