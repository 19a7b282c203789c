/**
 * What is there whatever a worker loads later. Each part imports it, so that the bundler makes one file of it:
 * a bundler makes a file of each set of modules that the same parts import, a dozen small ones here.
 */

export * from "../../grammar/in-thread.js";
export * from "../beginning.js";
export * from "../exact.js";
export * from "../gpu/remote-artifact.js";
export * from "../host.js";
export * from "../memory.js";
export * from "../serve.js";
export * from "../store/shards.js";
export * from "../wanted.js";
