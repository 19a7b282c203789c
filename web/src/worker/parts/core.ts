/**
 * Modules that a worker has in any case. Each part imports this file, so that the bundler makes one chunk of
 * them; otherwise each set of modules that the same parts import would be a chunk of its own, a dozen small
 * ones here.
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
