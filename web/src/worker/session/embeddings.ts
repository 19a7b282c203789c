import { RequestError } from "../../protocol/errors.js";
import type { BackendShape } from "../engine/backend.js";
import type { EngineCore } from "../engine/engine-core.js";
import type { Request } from "../engine/request.js";
import type { SamplingParams } from "../engine/sampling.js";

/**
 * The embeddings of texts. Either all texts are valid, or none is begun; `requests` receives the requests.
 */
export async function embedAll(
  core: EngineCore,
  texts: readonly (readonly number[])[],
  { contextLength }: BackendShape,
  params: SamplingParams,
  requests: Request[],
): Promise<Float32Array[]> {
  for (const [index, { length }] of texts.entries())
    if (length === 0 || length > contextLength)
      throw new RequestError(
        `This model's maximum context length is ${contextLength} tokens, but input ${index} has ${length} ` +
          "tokens: give it one at least, and no more than that.",
        "input",
        { code: length === 0 ? "invalid-request" : "context-overflow" },
      );
  return Promise.all(
    texts.map(
      (tokens) =>
        new Promise<Float32Array>((resolve, reject) => {
          const listener = {
            token: () => false,
            embedding: resolve,
            finish: () => reject(new Error("a request for an embedding ended without one")),
            fail: reject,
          };
          requests.push(core.submit(tokens, params, listener));
        }),
    ),
  );
}
