// The engine's worker with a GPU: Dawn, Chrome's WebGPU, from the package `webgpu`.
import { create, globals } from "webgpu";

Object.assign(globalThis, globals);
const navigator = { gpu: create([]), userAgent: "Node" };
Object.defineProperty(globalThis, "navigator", { value: navigator, configurable: true });
await import("nearfar/node/worker");
