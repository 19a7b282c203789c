/**
 * The web's Prompt API (`LanguageModel`) over nearfar, for browsers that lack it:
 * https://webmachinelearning.github.io/prompt-api/
 */

import { Model, type ModelSource } from "./model.js";
import { checkOptions, messagesOf, notSupported, toolsOf, unsupportedOf } from "./options.js";
import { Session } from "./session.js";
import type {
  Availability,
  CreateCoreOptions,
  CreateOptions,
  LanguageModelFactory,
  LanguageModelSession,
} from "./types.js";

export type { ModelSource, PromptEngine } from "./model.js";
export type * from "./types.js";

/**
 * Makes a `LanguageModel` of the Prompt API over the model at an address, or over a model that a function
 * loads. The first `create` loads the model, and all sessions share it until `unload`.
 *
 * Images and sound are rejected with NotSupportedError, and so are tools if the model has no calls.
 */
export function createLanguageModel(source: ModelSource): LanguageModelFactory {
  const model = new Model(source);
  return {
    availability: async (options = {}) => (unsupportedOf(options) ? "unavailable" : model.availability),
    params: async () => ({ defaultTopK: 0, maxTopK: 128, defaultTemperature: 1, maxTemperature: 2 }),
    create: (options = {}) => create(model, options),
    unload: () => model.unload(),
  };
}

/** Options of `install`. */
export interface InstallOptions {
  /** Whether to replace the browser's own `LanguageModel` even if it has a model; false by default. */
  readonly replace?: boolean;
}

/** The objects that `install` has put into the global scope. */
const put = new WeakSet<object>();

/**
 * Puts a `LanguageModel` over `source` into the global scope. The browser's own one stays in use if it says
 * that it has a model or can download one; otherwise `source` answers. Returns whether this call installed
 * it: false if an earlier call has.
 */
export function install(source: ModelSource, { replace = false }: InstallOptions = {}): boolean {
  const { LanguageModel: own } = globalThis as { readonly LanguageModel?: LanguageModelFactory };
  if (own && put.has(own)) return false;
  const ours = createLanguageModel(source);
  const value = own && !replace ? besides(own, ours) : ours;
  put.add(value);
  Object.defineProperty(globalThis, "LanguageModel", { value, configurable: true, writable: true });
  return true;
}

/** Uses the browser's own model if it supports the options, otherwise ours. */
function besides(own: LanguageModelFactory, ours: LanguageModelFactory): LanguageModelFactory {
  const told = async (options: CreateCoreOptions): Promise<Availability> =>
    // `availability` throws if the browser has switched its model off.
    Promise.resolve(own.availability(options)).catch(() => "unavailable");
  const chosen = async (options: CreateCoreOptions): Promise<LanguageModelFactory> =>
    (await told(options)) === "unavailable" ? ours : own;
  return {
    availability: async (options = {}) => {
      const said = await told(options);
      return said === "unavailable" ? ours.availability(options) : said;
    },
    params: async () => (await chosen({})).params(),
    create: async (options = {}) => (await chosen(options)).create(options),
    unload: () => ours.unload(),
  };
}

async function create(model: Model, options: CreateOptions): Promise<LanguageModelSession> {
  options.signal?.throwIfAborted();
  const sampling = checkOptions(options);
  const initial = messagesOf(options.initialPrompts ?? [], "initialPrompts").messages;
  const tools = toolsOf(options);
  const engine = await model.load(options);
  if (tools.length > 0 && !engine.model.features?.includes("tools"))
    throw notSupported(`tools are not supported by the model ${engine.model.name}`);
  const session = new Session(engine, sampling, initial, tools);
  await session.measure();
  options.signal?.throwIfAborted();
  options.signal?.addEventListener("abort", () => session.destroy(), { once: true });
  return session;
}
