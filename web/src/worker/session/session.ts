import { precisionOf } from "../../artifact/manifest.js";
import { MAX_CHOICES, MAX_LABELS } from "../../format/constants.js";
import { disposedError, RequestError, toErrorRecord } from "../../protocol/errors.js";
import type {
  AnswerEvent,
  AnswerStats,
  EmbeddingInputs,
  EngineStats,
  GenerateRequest,
  LoadSettings,
  ModelCard,
  ProfileOptions,
  Prompt,
  RequestStats,
  StepProfile,
} from "../../protocol/messages.js";
import type { Loaded, ModelBackend } from "../device/loaded.js";
import { EngineCore } from "../engine/engine-core.js";
import type { Request } from "../engine/request.js";
import { parseSampling } from "../engine/sampling.js";
import { type Model, type ModelHooks, openModel } from "../loading/model.js";
import { Prompts } from "../prompts/prompts.js";
import { Answer } from "./answer.js";
import { Grammars } from "./grammars.js";

export interface SessionHooks extends ModelHooks {
  /** Called when the card of the model has changed. */
  readonly onCard: (card: ModelCard) => void;
  /** Called when the device was lost and cannot be reopened. */
  readonly onLost: (error: Error) => void;
}

/** A pending request of the page. */
interface Asked {
  /** One request for each answer, once the answers have begun. */
  readonly requests: Request[];
  /** Aborts the work before the answers begin. */
  readonly left: AbortController;
}

/** Checks how many answers a request asks for. */
export function checkCount(n: number, most: number = MAX_CHOICES): void {
  if (!Number.isInteger(n) || n < 1 || n > most)
    throw new RequestError(`n must be at least 1 and at most ${most}, not ${n}`, "n");
}

/** One loaded model inside the worker: text in, text out. */
export class Session {
  readonly #core: EngineCore;
  readonly #prompts: Prompts;
  readonly #grammars: Grammars;
  readonly #asked = new Map<number, Asked>();
  #loaded: Loaded;
  #last: AnswerStats | null = null;
  #reopened = 0;

  private constructor(
    private readonly model: Model,
    private readonly hooks: SessionHooks,
  ) {
    const { manifest, codec, loaded } = model;
    const { host, onProgress, onWarning, onCard, onLost } = hooks;
    this.#loaded = loaded;
    this.#prompts = new Prompts(codec, manifest, hooks.parts);
    const { vocabSize: size, eosTokenIds: ends } = manifest.model;
    this.#grammars = new Grammars(host.grammars, {
      ...{ size, ends },
      bytesOf: (token) => codec.tokenBytes(token),
    });
    this.#core = new EngineCore(loaded.executor, manifest.model.eosTokenIds, {
      reopen: () => this.#reopen(),
      // The engine warns when it continues with less memory.
      onWarning: (message) => {
        onCard(this.card());
        onWarning(message);
      },
      onLost,
      modelContext: manifest.model.contextLength,
      onCompiling: (compiled, total) => onProgress({ phase: "kernels", compiled, total }),
      onReading: (read, total) => onProgress({ phase: "prompt", read, total }),
    });
  }

  static async load(url: URL, settings: LoadSettings, hooks: SessionHooks): Promise<Session> {
    const model = await openModel(url, settings, hooks);
    try {
      const session = new Session(model, hooks);
      const { chats } = session.#prompts;
      if (chats.marksText) await chats.load();
      await model.settle();
      return session;
    } catch (error) {
      model.loaded.executor.dispose();
      throw error;
    }
  }

  card(): ModelCard {
    const { model, weights, quantization, checkpoint, license } = this.model.manifest;
    return {
      name: model.name,
      architecture: model.architecture,
      quantization,
      checkpoint,
      backend: this.model.backend,
      program: this.#loaded.program.name,
      choice: this.#loaded.choice,
      precision: precisionOf(this.#loaded.program),
      adapter: this.#loaded.adapterName,
      contextLength: this.#loaded.executor.shape.contextLength,
      largestStep: this.#core.largestStep,
      vocabSize: model.vocabSize,
      weightBytes: weights.bytes,
      license,
      features: [
        "logprobs",
        ...(this.hooks.host.grammars ? (["json_object", "json_schema", "grammar"] as const) : []),
        ...(this.hooks.host.grammars && this.#prompts.chats.canCall ? (["tools"] as const) : []),
      ],
    };
  }

  stats(): EngineStats {
    const { executor, buffers } = this.#loaded;
    return {
      backend: this.model.backend,
      program: this.#loaded.program.name,
      choice: this.#loaded.choice,
      gpuBuffers: buffers.count,
      gpuBytes: buffers.bytes,
      wasmBytes: executor.held?.bytes ?? 0,
      threads: executor.held?.threads ?? 0,
      launches: executor.launches,
      launchesPerToken: executor.launchesOf("step") + executor.launchesOf("greedy"),
      cachePages: executor.shape.groups.reduce((sum, { pages }) => sum + pages, 0),
      freeTokens: this.#core.freeTokens,
      contextLength: executor.shape.contextLength,
      largestStep: this.#core.largestStep,
      reopened: this.#reopened,
      last: this.#last,
    };
  }

  /** Starts a request; its events go to `tell`, the last one being "end", "read" or "error". */
  async generate(id: number, request: GenerateRequest, tell: (event: AnswerEvent) => void): Promise<void> {
    try {
      const { logprobs, options, grammar, labels, reading } = request;
      const n = labels?.length ?? request.n;
      checkCount(n, labels ? MAX_LABELS : MAX_CHOICES);
      if (this.#loaded.executor.shape.embedding) await this.#wrongTask();
      const { model, sampling } = this.model.manifest;
      const params = parseSampling(options, logprobs, model.vocabSize, sampling);
      const { requests, left } = this.#ask(id);
      // A request that needs nothing more goes on in the same turn, so that requests which are sent together
      // meet in the first step.
      if (this.#prompts.chats.lacks(request.prompt)) await this.#prompts.chats.load();
      const asked = this.#prompts.asked(request.prompt, params.stop, grammar ?? null);
      const { tokens: prompt } = asked;
      const extras = (labels || reading) && (await this.hooks.parts.extras());
      const forced = labels && extras?.labelTokens(this.model.codec, asked, labels);
      // A label is not an answer that is taken apart: each of its tokens is told with its log-probability.
      const shown = forced ? { ...asked, reader: () => null } : asked;
      const answer = new Answer(this.model.codec, shown, n, tell, (stats) => this.#ended(id, stats));
      const whole = asked.grammar && (await asked.grammar(grammar ?? null));
      const wanted = asked.grammar ? whole : grammar;
      const constraints = wanted
        ? await this.#grammars.followEach(wanted, n, left.signal, params.ignoreEos)
        : [];
      if (left.signal.aborted) return;
      if (reading && extras) {
        const onFail = (): void => this.abort(id);
        requests.push(extras.readPrompt(this.#core, prompt, reading, params, model.vocabSize, tell, onFail));
        return tell({ event: "accepted" });
      }
      if (forced && extras) {
        const { vocabSize } = this.model.manifest.model;
        for (const [i, tokens] of forced.entries()) {
          const one = { ...params, temperature: 0, maxTokens: tokens.length };
          requests.push(
            this.#core.submit(prompt, one, answer.choice(i), new extras.Forced(tokens, vocabSize)),
          );
        }
        return answer.begin();
      }
      if (request.prompt.kind === "text" && request.prompt.echo === "alone") return answer.echoed();
      for (let i = 0; i < n; i++) {
        const seed = BigInt.asUintN(64, params.seed + BigInt(i));
        const constraint = constraints[i] ?? null;
        requests.push(this.#core.submit(prompt, { ...params, seed }, answer.choice(i), constraint));
      }
      answer.begin();
    } catch (error) {
      this.abort(id);
      tell({ event: "error", error: toErrorRecord(error) });
    }
  }

  /** Starts the requests for embeddings; "embedded" is the last event, or "error". */
  async embed(id: number, inputs: EmbeddingInputs, tell: (event: AnswerEvent) => void): Promise<void> {
    try {
      if (!this.#loaded.executor.shape.embedding) await this.#wrongTask();
      const params = parseSampling({ max_tokens: 1 }, null, this.model.manifest.model.vocabSize);
      const { requests, left } = this.#ask(id);
      const { embedAll } = await this.hooks.parts.extras();
      if (left.signal.aborted) return;
      const tokensOf = (text: string): number[] => this.#prompts.asked({ kind: "text", text }, []).tokens;
      const texts = inputs.map((one) => (typeof one === "string" ? tokensOf(one) : one));
      const vectors = await embedAll(this.#core, texts, this.#loaded.executor.shape, params, requests);
      this.#asked.delete(id);
      tell({ event: "embedded", vectors, tokens: texts.reduce((sum, { length }) => sum + length, 0) });
    } catch (error) {
      this.abort(id);
      tell({ event: "error", error: toErrorRecord(error) });
    }
  }

  async #wrongTask(): Promise<never> {
    throw (await this.hooks.parts.extras()).wrongTask(this.model.manifest.model);
  }

  #ask(id: number): Asked {
    const asked = { requests: [], left: new AbortController() };
    this.#asked.set(id, asked);
    return asked;
  }

  abort(id: number): void {
    const asked = this.#asked.get(id);
    if (!asked) return;
    this.#asked.delete(id);
    asked.left.abort();
    for (const request of asked.requests) this.#core.cancel(request);
  }

  dispose(): void {
    this.#core.stop(disposedError());
    void this.#grammars.end();
    this.#loaded.executor.dispose();
  }

  /** Frees a failed device first, so that its memory can be used again. */
  async #reopen(): Promise<ModelBackend> {
    const { executor, choice } = this.#loaded;
    const { onProgress } = this.hooks;
    executor.dispose();
    onProgress({ phase: "reopening" });
    this.#loaded = { ...(await this.model.again(this.#loaded)), choice };
    this.#reopened += 1;
    this.hooks.onCard(this.card());
    onProgress({ phase: "reopened", contextLength: this.#loaded.executor.shape.contextLength });
    return this.#loaded.executor;
  }

  /**
   * Measures what each launch of a step costs. Rejects while the engine answers; the contents of its cache
   * are lost.
   */
  async profile(options: ProfileOptions): Promise<StepProfile> {
    const { checkedProfile, profileStep } = await this.hooks.parts.extras();
    const measured = await this.#core.alone(
      () => checkedProfile(this.#loaded.executor, options, this.#core.largestStep),
      (checked) => profileStep(this.#loaded.executor, checked),
    );
    return { program: this.#loaded.program.name, ...measured };
  }

  /** Counts the tokens of a prompt. */
  async count(prompt: Prompt): Promise<number> {
    if (this.#prompts.chats.lacks(prompt)) await this.#prompts.chats.load();
    return this.#prompts.asked(prompt, []).tokens.length;
  }

  #ended(id: number, stats: RequestStats | null): void {
    if (stats) this.#last = { ...stats, decodeTokensPerSecond: decodeRate(stats) };
    else this.abort(id);
    this.#asked.delete(id);
  }
}

function decodeRate({ completionTokens, decode }: RequestStats): number {
  return decode > 0 ? ((completionTokens - 1) * 1000) / decode : 0;
}
