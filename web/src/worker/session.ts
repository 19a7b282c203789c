import { type Found, findArtifacts } from "../both/artifacts.js";
import { ArtifactError, DeviceError, disposedError, RequestError, toErrorRecord } from "../both/errors.js";
import { type Fetch, fetchText, within } from "../both/http.js";
import { type Manifest, type Program, precisionOf } from "../both/manifest.js";
import type {
  AnswerEvent,
  AnswerStats,
  BackendChoice,
  EngineStats,
  GenerateRequest,
  LoadProgress,
  LoadSettings,
  ModelCard,
  ProfileOptions,
  ProgramChoice,
  Prompt,
  RequestStats,
  StepProfile,
  TokenScore,
} from "../both/messages.js";
import { type Chosen, choose } from "./choice.js";
import { EngineCore } from "./engine/engine-core.js";
import { checkedProfile, profileStep } from "./engine/profile.js";
import type { Request, RequestListener, TokenLogprobs } from "./engine/request.js";
import { parseSampling, type SamplingParams } from "./engine/sampling.js";
import { type LoadOptions, loadExecutor } from "./gpu/load.js";
import type { Host } from "./host.js";
import type { Loaded, ModelBackend } from "./loaded.js";
import { openOpfsCache } from "./store/shard-cache.js";
import type { ShardProgress } from "./store/shards.js";
import type { TextCodec } from "./text/types.js";

/** OpenAI's limit, and far more than a device's slots run at once. */
const MAX_CHOICES = 128;

export interface SessionHooks {
  readonly host: Host;
  readonly signal: AbortSignal;
  /** The name of this load. */
  readonly load: string;
  /** Whether the page of another load was left. */
  readonly hasLeft: (load: string) => Promise<boolean>;
  readonly onProgress: (progress: LoadProgress) => void;
  readonly onWarning: (message: string) => void;
  /** What is known of the model has changed. */
  readonly onCard: (card: ModelCard) => void;
  /** The device was lost and cannot be opened anew. */
  readonly onLost: (error: Error) => void;
}

/** How many answers a request may ask for. */
export function checkCount(n: number): void {
  if (!Number.isInteger(n) || n < 1 || n > MAX_CHOICES)
    throw new RequestError(`n must be at least 1 and at most ${MAX_CHOICES}, not ${n}`, "n");
}

/** One loaded model inside the worker: text in, text out. */
export class Session {
  readonly #core: EngineCore;
  readonly #requests = new Map<number, Request[]>();
  #last: AnswerStats | null = null;
  #reopened = 0;

  private constructor(
    private readonly manifest: Manifest,
    private readonly backend: BackendChoice,
    private loaded: Loaded,
    private readonly codec: TextCodec,
    /** Loads the executor that runs once more. */
    private readonly again: (loaded: Loaded) => Promise<Loaded>,
    private readonly hooks: SessionHooks,
  ) {
    const { onProgress, onWarning, onCard, onLost } = hooks;
    this.#core = new EngineCore(loaded.executor, manifest.model.eosTokenIds, {
      reopen: () => this.#reopen(),
      // The engine warns where it goes on with less.
      onWarning: (message) => {
        onCard(this.card());
        onWarning(message);
      },
      onLost,
      modelContext: manifest.model.contextLength,
      onCompiling: (compiled, total) => onProgress({ phase: "kernels", compiled, total }),
    });
  }

  static async load(url: URL, settings: LoadSettings, hooks: SessionHooks): Promise<Session> {
    const base = new URL(url);
    if (!base.pathname.endsWith("/")) base.pathname += "/";
    const { signal, onProgress, host } = hooks;
    onProgress({ phase: "manifest" });
    const { fetch } = host;
    const artifacts = await findArtifacts(base, settings.backend, { fetch, signal });
    let next: Chosen | null = await choose(artifacts, settings.backend);
    for (;;) {
      onProgress({ phase: "backend", backend: next.choice });
      try {
        return await Session.#load(next, settings, hooks);
      } catch (error) {
        next = error instanceof DeviceError ? next.other(error) : null;
        if (!next) throw error;
      }
    }
  }

  static async #load(
    { choice, found }: Chosen,
    settings: LoadSettings,
    hooks: SessionHooks,
  ): Promise<Session> {
    const { base, manifest } = found;
    const { signal, load, hasLeft, onProgress, onWarning, host } = hooks;
    const cache = await openOpfsCache(
      base,
      manifest.weights.shards.map(({ sha256 }) => sha256),
    );
    const codec = loadCodec(found, host.fetch, signal);
    codec.catch(() => undefined);
    const open = choice.name === "wasm" ? loadWasm : loadExecutor;
    const options = {
      ...settings,
      signal,
      cache,
      onWarning,
      load,
      hasLeft,
      host,
      fetch: host.fetch,
      onKernels: (compiled: number, total: number) => onProgress({ phase: "kernels", compiled, total }),
      onTrying: ({ name }: Program) => onProgress({ phase: "trying", program: name }),
      onProgram: ({ name }: Program, choice: ProgramChoice) =>
        onProgress({ phase: "program", program: name, choice }),
      onShards: (progress: ShardProgress) => onProgress({ phase: "weights", ...progress }),
    } satisfies LoadOptions & { readonly host: Host };
    const loaded = await open(base, manifest, options);
    // The same program with as large a cache: requests go on there. Less is taken of what was left open.
    const again = ({ program, executor }: Loaded): Promise<Loaded> =>
      open(base, manifest, {
        ...options,
        onProgram: undefined,
        program: program.name,
        kvMemory: executor.kvMemory,
        orLess: settings.kvMemory === undefined,
      });
    try {
      return new Session(manifest, choice, loaded, await codec, again, hooks);
    } catch (error) {
      loaded.executor.dispose();
      throw error;
    }
  }

  card(): ModelCard {
    const { model, weights, quantization, license } = this.manifest;
    return {
      name: model.name,
      architecture: model.architecture,
      quantization,
      backend: this.backend,
      program: this.loaded.program.name,
      choice: this.loaded.choice,
      precision: precisionOf(this.loaded.program),
      adapter: this.loaded.adapterName,
      contextLength: this.loaded.executor.shape.contextLength,
      largestStep: this.#core.largestStep,
      vocabSize: model.vocabSize,
      weightBytes: weights.bytes,
      license,
    };
  }

  stats(): EngineStats {
    const { executor, buffers } = this.loaded;
    return {
      backend: this.backend,
      program: this.loaded.program.name,
      choice: this.loaded.choice,
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

  /** Starts a request; its events go to `tell`, the last one being "end" or "error". */
  generate(id: number, request: GenerateRequest, tell: (event: AnswerEvent) => void): void {
    try {
      const { n, logprobs, options } = request;
      checkCount(n);
      const params = parseSampling(options, logprobs, this.manifest.model.vocabSize);
      const prompt = this.#encode(request.prompt);
      // A plain prompt's answer continues its text; a chat's answer begins a new one, unless it is the rest
      // of one.
      const context = request.prompt.kind === "text" || request.prompt.continueLast ? prompt : [];
      const answer = new Answer(this.codec, params, context, n, tell, (stats) => this.#ended(id, stats));
      this.#requests.set(id, []);
      for (let i = 0; i < n; i++) {
        const seed = BigInt.asUintN(64, params.seed + BigInt(i));
        this.#requests.get(id)?.push(this.#core.submit(prompt, { ...params, seed }, answer.choice(i)));
      }
      tell({ event: "accepted" });
    } catch (error) {
      this.abort(id);
      tell({ event: "error", error: toErrorRecord(error) });
    }
  }

  abort(id: number): void {
    for (const request of this.#requests.get(id) ?? []) this.#core.cancel(request);
    this.#requests.delete(id);
  }

  dispose(): void {
    this.#core.stop(disposedError());
    this.loaded.executor.dispose();
  }

  /** Frees what is left of a device that failed, before the memory is taken again. */
  async #reopen(): Promise<ModelBackend> {
    const { executor, choice } = this.loaded;
    const { onProgress } = this.hooks;
    executor.dispose();
    onProgress({ phase: "reopening" });
    this.loaded = { ...(await this.again(this.loaded)), choice };
    this.#reopened += 1;
    this.hooks.onCard(this.card());
    onProgress({ phase: "reopened", contextLength: this.loaded.executor.shape.contextLength });
    return this.loaded.executor;
  }

  /**
   * What each launch of a step costs. Refused while the engine answers; what its cache holds is forgotten.
   */
  async profile(options: ProfileOptions): Promise<StepProfile> {
    const measured = await this.#core.alone(
      () => checkedProfile(this.loaded.executor, options, this.#core.largestStep),
      (checked) => profileStep(this.loaded.executor, checked),
    );
    return { program: this.loaded.program.name, ...measured };
  }

  /** How many tokens a prompt has. */
  count(prompt: Prompt): number {
    return this.#encode(prompt).length;
  }

  #encode(prompt: Prompt): number[] {
    if (prompt.kind === "chat")
      return this.codec.chat(prompt.messages, { continueLast: prompt.continueLast });
    const tokens = this.codec.encode(prompt.text);
    const { bosTokenId } = this.manifest.model;
    return tokens.length === 0 && bosTokenId !== null ? [bosTokenId] : tokens;
  }

  #ended(id: number, stats: RequestStats | null): void {
    if (stats) this.#last = { ...stats, decodeTokensPerSecond: decodeRate(stats) };
    else this.abort(id);
    this.#requests.delete(id);
  }
}

function decodeRate({ completionTokens, decode }: RequestStats): number {
  return decode > 0 ? ((completionTokens - 1) * 1000) / decode : 0;
}

/**
 * The tokenizer comes by dynamic import: it is a third of the code and is wanted only once the weights are on
 * their way.
 */
async function loadCodec(
  { base, manifest }: Found,
  fetch: Fetch | undefined,
  signal: AbortSignal,
): Promise<TextCodec> {
  const read = async (name: string): Promise<string | null> => {
    const entry = manifest.tokenizerFiles.find(({ file }) => file.endsWith(`/${name}`));
    return entry ? fetchText(within(base, entry.file), entry.sha256, { fetch, signal }) : null;
  };
  const [{ createTextCodec }, tokenizer, config, template] = await Promise.all([
    import("./text/index.js"),
    read("tokenizer.json"),
    read("tokenizer_config.json"),
    read("chat_template.jinja"),
  ]);
  if (tokenizer === null)
    throw new ArtifactError("The artifact has no tokenizer/tokenizer.json. Build it again.");
  const files = {
    tokenizerJson: JSON.parse(tokenizer) as unknown,
    tokenizerConfig: JSON.parse(config ?? "{}") as unknown,
    ...(template !== null && { chatTemplate: template }),
  };
  return createTextCodec(files, manifest.model);
}

/** The backend for browsers without WebGPU comes by dynamic import too: most do not want it. */
async function loadWasm(
  base: URL,
  manifest: Manifest,
  options: LoadOptions & { readonly host: Host; readonly threads?: number | undefined },
): Promise<Loaded> {
  return (await import("./wasm/load.js")).loadWasm(base, manifest, options);
}

/** Collects the choices of one request and tells their text. */
class Answer {
  readonly #finished: RequestStats[] = [];

  constructor(
    private readonly codec: TextCodec,
    private readonly params: SamplingParams,
    private readonly context: readonly number[],
    private readonly n: number,
    private readonly tell: (event: AnswerEvent) => void,
    private readonly onEnd: (stats: RequestStats | null) => void,
  ) {}

  choice(index: number): RequestListener {
    const stream = this.codec.stream(this.params.stop, this.context);
    let stopped = false;
    return {
      token: (token, logprobs) => {
        const delta = stream.push(token);
        const { text } = delta;
        stopped = delta.stopped;
        const score = logprobs && this.#score(token, logprobs);
        if (text !== "" || score) this.tell({ event: "delta", index, text, score });
        return !stopped;
      },
      finish: (reason, stats) => {
        this.tell({ event: "finish", index, text: stopped ? "" : stream.flush(), reason });
        this.#finished.push(stats);
        if (this.#finished.length === this.n) this.#end();
      },
      fail: (error) => {
        this.onEnd(null);
        this.tell({ event: "error", error: toErrorRecord(error) });
      },
    };
  }

  #end(): void {
    const [first] = this.#finished;
    if (!first) return;
    const completionTokens = this.#finished.reduce((sum, stats) => sum + stats.completionTokens, 0);
    const stats = { ...first, completionTokens };
    this.onEnd(first);
    this.tell({ event: "end", stats });
  }

  #score(token: number, { logprob, top }: TokenLogprobs): TokenScore {
    const text = (id: number): string => this.codec.tokenText(id);
    return {
      token: text(token),
      logprob,
      top: top.map((other) => ({ token: text(other.token), logprob: other.logprob })),
    };
  }
}
