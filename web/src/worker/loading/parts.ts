/**
 * The parts of the worker's code that are loaded when they are wanted, each a chunk of its own. The worker's
 * entries give them (parts/index.ts), because a module that loads a part itself is in a cycle with it.
 *
 * @throws each: NearfarError "unreachable" where its file cannot be had.
 */
export interface Parts {
  /** Nobody wants both backends. */
  gpu(): Promise<Pick<typeof import("../gpu/load.js"), "loadExecutor">>;
  wasm(): Promise<Pick<typeof import("../wasm/load.js"), "loadWasm">>;
  /** Tokenizer and chat template: a third of the code, and wanted only once the weights are on their way. */
  text(): Promise<Pick<typeof import("../text/index.js"), "createTextCodec">>;
  /** What takes answers apart: many models mark nothing, and many requests call nothing. */
  answers(): Promise<typeof import("../answers/index.js")>;
  /** The grammar of arguments that are not JSON: most models write JSON. */
  spelled(): Promise<Pick<typeof import("../answers/spelled.js"), "spelledArguments">>;
}
