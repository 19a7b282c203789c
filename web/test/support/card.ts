/** Descriptions of a model and of an answer, as a worker gives them, for workers in plain code. */

import type { ModelCard } from "../../src/protocol/messages.js";

export const CARD: ModelCard = {
  name: "sample",
  architecture: "llama",
  quantization: "q4",
  program: "f32",
  backend: { name: "webgpu", why: "only", reason: "" },
  choice: { deviceClass: "integrated", why: "only", measured: {} },
  precision: "f32",
  adapter: "none",
  contextLength: 128,
  largestStep: 256,
  vocabSize: 97,
  weightBytes: 1,
  license: null,
  checkpoint: null,
  features: [],
};
export const STATS = { promptTokens: 1, cachedTokens: 0, completionTokens: 1, ttft: 1, decode: 1 };
