/**
 * The modules that a worker has whatever it loads later. Each part imports this file, so that the bundler makes
 * one chunk of all of them: without it each set of modules that the same parts import is a chunk of its own, a
 * dozen small ones here.
 */

export * from "../../grammar/in-thread.js";
export * from "../device/beginning.js";
export * from "../device/memory.js";
export * from "../device/remote-artifact.js";
export * from "../device/wanted.js";
export * from "../host.js";
export * from "../session/serve.js";
export * from "../store/shards.js";
export * from "../text/jinja/exact.js";
