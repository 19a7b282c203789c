/**
 * The web's Prompt API (`LanguageModel`) over nearfar, for browsers that have none:
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
 * What the Prompt API calls `LanguageModel`, over the model at an address, or one that a function loads. The
 * first `create` loads it, and all sessions share it until `unload`.
 *
 * Images and sound are refused with NotSupportedError, and so are tools where the model has none.
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

/** What `install` may be told. */
export interface InstallOptions {
  /** Whether it also stands in for a `LanguageModel` of the browser that has a model; false by default. */
  readonly replace?: boolean;
}

/** What `install` has put there. */
const put = new WeakSet<object>();

/**
 * Puts a `LanguageModel` over `source` into the global scope. A browser's own stays in use where it says that it
 * has a model, or can download one; where it has none, or is not there, `source` answers. Whether this call did
 * so: not where an earlier one has.
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

/** The browser's own model where it has one for what is asked, else ours. */
function besides(own: LanguageModelFactory, ours: LanguageModelFactory): LanguageModelFactory {
  const told = async (options: CreateCoreOptions): Promise<Availability> =>
    // It throws where the browser has switched its model off.
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
