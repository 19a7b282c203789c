/**
 * What is there whatever a worker loads later. Each part imports it, so that the bundler makes one file of it:
 * a bundler makes a file of each set of modules that the same parts import, a dozen small ones here.
 */

export * from "../../grammar/in-thread.js";
export * from "../device/beginning.js";
export * from "../device/memory.js";
export * from "../device/remote-artifact.js";
export * from "../device/wanted.js";
export * from "../host.js";
export * from "../session/serve.js";
export * from "../store/shards.js";
export * from "../text/exact.js";
