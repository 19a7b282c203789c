import { later } from "../../protocol/errors.js";
import type { Parts } from "../loading/parts.js";
import "./core.js";

export const parts: Parts = {
  gpu: () => later(() => import("./gpu.js"), "The code of the WebGPU backend"),
  wasm: () => later(() => import("./wasm.js"), "The code of the WebAssembly backend"),
  text: () => later(() => import("./text.js"), "The tokenizer's code"),
  answers: () => later(() => import("./answers.js"), "The code that reads calls and reasoning"),
  spelled: () => later(() => import("./spelled.js"), "The code of tools"),
  extras: () => later(() => import("./extras.js"), "The code of embeddings and decisions"),
};
