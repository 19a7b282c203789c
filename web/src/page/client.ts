import { modelUrl } from "../artifact/places.js";
import { MAX_LABEL_CHARS, MAX_LABELS } from "../format/constants.js";
import {
  abortReason,
  DeviceError,
  disposedError,
  later,
  linkedAbort,
  type NearfarError,
  throwIfAborted,
} from "../protocol/errors.js";
import type { EngineStats, ModelCard, ProfileOptions, Prompt, StepProfile } from "../protocol/messages.js";
import type * as openai from "../protocol/openai.js";
import type { StartWorker, WorkerPort } from "../protocol/ports.js";
import { Pulse } from "../protocol/pulse.js";
import { trusted } from "../protocol/trusted.js";
import type { ResponseRequest, Responses } from "../responses/types.js";
import { type AnswerSource, Completions, type Prepared } from "./completions.js";
import { fitContext } from "./context.js";
import { checkedMessages } from "./conversation.js";
import { createEmbeddings } from "./embeddings.js";
import { PATIENCE, WorkerLink } from "./link.js";
import { checkEngineOptions, checkProfileOptions, type EngineOptions } from "./options.js";
import { CHAT, TEXT } from "./replies.js";
import { prepareChat, prepareText, promptOf } from "./requests.js";
import { checkedCalling } from "./tools.js";

export { WorkerLink };

/**
 * Loads the artifact at `url` (the folder that holds manifest.json, or "hf:OWNER/NAME[@REVISION][/FOLDER]" of
 * the Hugging Face Hub) into a worker.
 *
 * @throws ArtifactError, DeviceError, or the reason of `signal` when that says so.
 */
export async function createEngine(url: string | URL, options: EngineOptions = {}): Promise<Engine> {
  const start = (signal: AbortSignal | undefined): WorkerPort | Promise<WorkerPort> =>
    options.worker?.() ?? startWorker(signal);
  return openEngine(start, modelUrl(url), options);
}

/** Loads the artifact at `url` in a worker from `start`, now and at each `reload`. */
export async function openEngine(start: StartWorker, url: URL, options: EngineOptions): Promise<Engine> {
  checkEngineOptions(options);
  const open = async (signal: AbortSignal | undefined): Promise<Opened> => {
    throwIfAborted(signal);
    const link = new WorkerLink(await started(start, signal, options.patience ?? PATIENCE));
    try {
      return { link, card: await link.load(url, { ...options, ...(signal && { signal }) }) };
    } catch (error) {
      await link.close();
      throw error;
    }
  };
  const { link, card } = await open(options.signal);
  if ((options.persist ?? true) && link.hasDownloaded) void askToKeep();
  return new Engine(link, card, { open, contextPolicy: options.contextPolicy ?? "error" });
}

/** Runs `start`. If it takes longer than `patience` seconds, the late worker is terminated. */
async function started(
  start: StartWorker,
  signal: AbortSignal | undefined,
  patience: number,
): Promise<WorkerPort> {
  const stopping = linkedAbort(signal);
  const starting = (async () => start(stopping.signal))();
  let pulse: Pulse | null = null;
  const given = new Promise<never>((_, reject) => {
    stopping.signal.addEventListener("abort", () => reject(abortReason(signal)), { once: true });
    const why = `The engine's worker has not started for ${patience} s. Load the model again.`;
    pulse = new Pulse(patience, () => true, {
      ask: () => undefined,
      silent: () => reject(new DeviceError(why, { code: "worker-failed" })),
    });
    pulse.watch();
  });
  try {
    return await Promise.race([starting, given]);
  } catch (error) {
    starting.then(
      (port) => port.terminate(),
      () => undefined,
    );
    throw error;
  } finally {
    (pulse as Pulse | null)?.end();
    stopping.stop();
  }
}

/** Asks for permanent storage. It fails silently: the browser decides. */
async function askToKeep(): Promise<void> {
  // `storage` is missing outside of windows, and in pages without https.
  const { storage } = (globalThis.navigator ?? {}) as { readonly storage?: Partial<StorageManager> };
  await storage?.persist?.().catch(() => undefined);
}

interface Opened {
  readonly link: WorkerLink;
  readonly card: ModelCard;
}

interface EngineParts {
  readonly contextPolicy: openai.ContextPolicy;
  readonly open: (signal: AbortSignal | undefined) => Promise<Opened>;
}

/**
 * Starts the worker from its file, which is all that a strict Content-Security-Policy allows. If it does not
 * start, uses a copy in the package, which development servers have: those that prebundle dependencies (Vite
 * 6 and 7) leave worker.js behind.
 */
export async function startWorker(signal: AbortSignal | undefined): Promise<Worker> {
  const worker = workerOfFile();
  if (await starts(worker, signal)) return worker;
  worker.terminate();
  const { workerSource } = await later(() => import("nearfar/worker-source"), "nearfar/worker-source").catch(
    () => ({ workerSource: null }),
  );
  if (workerSource !== null) return workerOf(workerSource);
  throw new DeviceError(
    "The engine's worker did not start: its file cannot be loaded. Is this page offline? Or has the app's bundler " +
      "left worker.js behind, which must lie beside the script that holds the engine (web/docs of nearfar)?",
    { code: "worker-failed" },
  );
}

function workerOfFile(): Worker {
  try {
    // Bundlers look for exactly this expression.
    return trusted(
      () => new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "nearfar" }),
    );
  } catch (error) {
    if (!(error instanceof DOMException) || error.name !== "SecurityError") throw error;
  }
  // Browsers reject workers of another origin, such as a CDN's, but let a worker of this page import from
  // there.
  const here = import.meta.url;
  return workerOf(`import ${JSON.stringify(new URL("./worker.js", here).href)};`);
}

function workerOf(code: string): Worker {
  const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  // The blob keeps the worker's address: its threads and the grammars' worker start from there.
  return trusted(() => new Worker(blob, { type: "module", name: "nearfar" }));
}

/** Whether a worker sends its first message before it fails. */
function starts(worker: Worker, signal: AbortSignal | undefined): Promise<boolean> {
  const settled = new AbortController();
  const once = { once: true, signal: settled.signal };
  const answer = new Promise<boolean>((resolve, reject) => {
    worker.addEventListener("message", () => resolve(true), once);
    worker.addEventListener("error", () => resolve(false), once);
    const onAbort = (): void => {
      worker.terminate();
      reject(abortReason(signal));
    };
    signal?.addEventListener("abort", onAbort, once);
  });
  return answer.finally(() => settled.abort());
}

const loadDecide = () => later(() => import("./decide.js"), "nearfar/decide");

/** A loaded model. */
export class Engine {
  readonly chat: {
    readonly completions: Completions<
      openai.ChatCompletionRequest,
      openai.ChatCompletionChunk,
      openai.ChatCompletion
    >;
  };
  readonly embeddings = {
    /** Gives the embeddings of texts or token ids, with length 1, from a model that gives embeddings. */
    create: (request: openai.EmbeddingRequest): Promise<openai.EmbeddingResponse> =>
      createEmbeddings(this.#link, this.#loaded.name, request),
  };
  /** OpenAI's Responses API. */
  readonly responses = {
    create: async (request: ResponseRequest) =>
      (await later(() => import("../responses/index.js"), "nearfar/responses")).respond(this, request),
  } as Responses;
  readonly completions: Completions<openai.CompletionRequest, openai.CompletionChunk, openai.Completion>;
  #link: WorkerLink;
  #loaded: ModelCard;
  #reloading: Promise<void> | null = null;
  #stopReload: () => void = () => undefined;
  #disposed: Promise<void> | null = null;

  /** Made by {@link createEngine}. */
  constructor(
    link: WorkerLink,
    loaded: ModelCard,
    private readonly parts?: EngineParts,
  ) {
    this.#link = link;
    this.#loaded = loaded;
    const { name } = loaded;
    // The closure uses the current link, because a reload replaces it.
    const source: AnswerSource = { generate: (request) => this.#link.generate(request) };
    const prepare = (request: openai.ChatCompletionRequest): Prepared | Promise<Prepared> => {
      // prepareChat rejects a request that is not an object.
      const policy = request?.context_policy ?? this.parts?.contextPolicy ?? "error";
      const prepared = prepareChat(request, name);
      // Most requests are sent in the same turn of the event loop.
      if (policy === "error") return prepared;
      const count = (prompt: Prompt): Promise<number> => this.#link.count(prompt);
      return fitContext(prepared, policy, this.model.contextLength, count);
    };
    const prepareOfText = (request: openai.CompletionRequest): Prepared => prepareText(request, name);
    this.chat = { completions: new Completions(source, name, "chatcmpl", CHAT, prepare) };
    this.completions = new Completions(source, name, "cmpl", TEXT, prepareOfText);
  }

  /**
   * Settles with the reason once the engine has given up: its worker died or hangs, or the GPU was lost and
   * could not be reopened. Does not settle by `dispose`. After `reload` it is another promise.
   */
  get lost(): Promise<NearfarError> {
    return this.#link.lost;
  }

  /**
   * Loads the same model again with the same options, in a new worker, whatever the state of the old one;
   * answers in progress end with an error. The engine stays the same object, and a conversation continues
   * with its next request. Weights come from the browser's storage if they are there.
   *
   * @throws the errors of createEngine; then the engine can be reloaded again.
   */
  reload({ signal }: { readonly signal?: AbortSignal } = {}): Promise<void> {
    this.#reloading ??= this.#reload(signal).finally(() => {
      this.#reloading = null;
    });
    return this.#reloading;
  }

  async #reload(signal: AbortSignal | undefined): Promise<void> {
    if (this.#disposed || !this.parts) throw disposedError();
    throwIfAborted(signal);
    const why = "The model is being loaded again. Ask again once reload() has resolved.";
    await this.#link.close(new DeviceError(why, { code: "device-lost" }));
    const opening = linkedAbort(signal);
    this.#stopReload = opening.stop;
    try {
      if (this.#disposed) opening.stop();
      const { link, card } = await this.parts.open(opening.signal);
      this.#link = link;
      this.#loaded = card;
    } catch (error) {
      throw this.#disposed ? disposedError() : error;
    }
  }

  /** The model; its context may get shorter when a lost GPU is reopened. */
  get model(): ModelCard {
    return this.#link.card ?? this.#loaded;
  }

  /** The engine's state and the speed of its last answer. After `dispose`: the last state. */
  stats(): Promise<EngineStats> {
    return this.#link.stats();
  }

  /**
   * Measures what each launch of a step costs on this GPU, while the engine is idle; the contents of its
   * cache are lost.
   *
   * @throws DeviceError if the browser cannot measure it (timestamp-query), RequestError while the engine
   * answers.
   */
  async profile(options: ProfileOptions = {}): Promise<StepProfile> {
    checkProfileOptions(options);
    return this.#link.profile(options);
  }

  /**
   * Decides which of several labels, or which of several numbers (`values`), answers a prompt: a conversation, a
   * text or token ids. The probabilities are the model's; nothing else is generated. `neutral`: the same prompt
   * without content; what the model prefers after it is taken out of the probabilities.
   *
   * @throws RequestError for fewer than 2 or too many labels, equal ones, and what does not fit the context.
   */
  async decide(
    prompt: openai.DecisionPrompt,
    labels: readonly string[] | null,
    options: openai.DecisionOptions = {},
  ): Promise<openai.Decision> {
    const { decide } = await loadDecide();
    return decide({ ...this.#asking, MAX_LABELS, MAX_LABEL_CHARS }, prompt, labels, options);
  }

  /**
   * Reads a prompt and writes nothing: gives what the model shows about it before it answers.
   *
   * @throws RequestError for ids of tokens that the model lacks, and for a prompt that does not fit the context.
   */
  async readPrompt(
    prompt: openai.DecisionPrompt,
    options: openai.ReadPromptOptions = {},
  ): Promise<openai.ReadPrompt> {
    const { readPrompt } = await loadDecide();
    return readPrompt(this.#asking, prompt, options);
  }

  get #asking() {
    const source: AnswerSource = { generate: (request) => this.#link.generate(request) };
    return { source, model: this.#loaded.name, promptOf };
  }

  /** Counts the tokens in the prompt of a conversation, with the tools that may be called. */
  async countTokens(
    messages: readonly openai.MessageParam[],
    request: Pick<openai.ChatCompletionRequest, "tools" | "tool_choice" | "chat_template_kwargs"> = {},
  ): Promise<number> {
    const { tools, tool_choice, chat_template_kwargs: variables } = request;
    const calling = checkedCalling({ tools, tool_choice, parallel_tool_calls: null });
    const asked = { ...(calling && { calling }), ...(variables && { variables }) };
    const told = { messages: checkedMessages(messages), ...asked };
    return this.#link.count({ kind: "chat", ...told, continueLast: false });
  }

  /** Ends all answers and a reload in progress, frees every GPU buffer, and ends the worker. */
  dispose(): Promise<void> {
    this.#disposed ??= this.#dispose();
    return this.#disposed;
  }

  async #dispose(): Promise<void> {
    const closed = this.#link.close();
    this.#stopReload();
    await this.#reloading?.catch(() => undefined);
    await closed;
    // A reload may have finished meanwhile and replaced the link.
    await this.#link.close();
  }
}
