/**
 * The parts of the worker's code that are loaded when they are needed, each a chunk of its own. The worker's
 * entries pass them in (parts/index.ts), because a module that loads a part itself would be in a cycle with
 * it.
 *
 * @throws each: NearfarError "unreachable" if its file cannot be loaded.
 */
export interface Parts {
  /** A load needs one of the two backends, never both. */
  gpu(): Promise<Pick<typeof import("../gpu/load.js"), "loadExecutor">>;
  wasm(): Promise<Pick<typeof import("../wasm/load.js"), "loadWasm">>;
  /** Tokenizer and chat template: a third of the code, needed only when the weights are being downloaded. */
  text(): Promise<Pick<typeof import("../text/index.js"), "createTextCodec">>;
  /** The code that takes answers apart: many models mark nothing, and many requests have no tools. */
  answers(): Promise<typeof import("../answers/index.js")>;
  /** The grammar of arguments that are not JSON; most models write JSON. */
  spelled(): Promise<Pick<typeof import("../answers/spelled.js"), "spelledArguments">>;
  /** Embeddings, decisions, and the measurement of a step: few pages use them. */
  extras(): Promise<typeof import("../session/extras.js")>;
}
