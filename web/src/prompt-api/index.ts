/**
 * The web's Prompt API (`LanguageModel`) over nearfar, for browsers that have none:
 * https://webmachinelearning.github.io/prompt-api/
 */

import { Model, type ModelSource } from "./model.js";
import { checkOptions, messagesOf, notSupported, toolsOf, unsupportedOf } from "./options.js";
import { Session } from "./session.js";
import type { CreateOptions, LanguageModelFactory, LanguageModelSession } from "./types.js";

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

/**
 * Puts `createLanguageModel(source)` where the browser has no `LanguageModel` of its own, and says whether it
 * did. A browser's own is left alone, even one that has no model.
 */
export function install(source: ModelSource): boolean {
  if ("LanguageModel" in globalThis) return false;
  const value = createLanguageModel(source);
  Object.defineProperty(globalThis, "LanguageModel", { value, configurable: true, writable: true });
  return true;
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
