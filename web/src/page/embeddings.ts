import { MAX_INPUTS } from "../format/constants.js";
import { abortReason, fromErrorRecord, RequestError, throwIfAborted } from "../protocol/errors.js";
import type { AnswerEvent, EmbeddingInputs } from "../protocol/messages.js";
import type { EmbeddingRequest, EmbeddingResponse } from "../protocol/openai.js";
import type { Channel } from "./channel.js";
import { check, SIGNAL, TEXT, type ValueKind } from "./requests.js";

const isTokens = (value: unknown): boolean =>
  Array.isArray(value) && value.length > 0 && value.every((token) => Number.isInteger(token));
const INPUT: ValueKind = [
  "a text, a list of token ids, or a list of either",
  (value) =>
    typeof value === "string" ||
    isTokens(value) ||
    (Array.isArray(value) &&
      value.length > 0 &&
      (value.every((one) => typeof one === "string") || value.every(isTokens))),
];
const KNOWN = {
  input: INPUT,
  model: TEXT,
  dimensions: [
    "a whole number, at least 1",
    (value) => Number.isInteger(value) && Number(value) >= 1,
  ] as ValueKind,
  encoding_format: ['"float" or "base64"', (value) => value === "float" || value === "base64"] as ValueKind,
  user: TEXT,
  signal: SIGNAL,
};

/** The source of the embeddings. */
interface Source {
  embed(inputs: EmbeddingInputs): { readonly events: Channel<AnswerEvent>; readonly abort: () => void };
}

/** Answers a request for embeddings of the model that is loaded. */
export async function createEmbeddings(
  source: Source,
  model: string,
  request: EmbeddingRequest,
): Promise<EmbeddingResponse> {
  check(request, KNOWN, model);
  const { input, dimensions } = request;
  const signal = request.signal ?? undefined;
  if (input == null) throw new RequestError("input is missing: give a text", "input");
  throwIfAborted(signal);
  const inputs = inputsOf(input);
  if (inputs.length > MAX_INPUTS)
    throw new RequestError(`input has ${inputs.length} texts; at most ${MAX_INPUTS} are allowed`, "input");
  const { events, abort } = source.embed(inputs);
  const event = await new Promise<AnswerEvent>((resolve, reject) => {
    const onAbort = (): void => {
      abort();
      reject(abortReason(signal));
    };
    signal?.addEventListener("abort", onAbort, { once: true });
    events.take().then((taken) => {
      signal?.removeEventListener("abort", onAbort);
      resolve(taken);
    }, reject);
  });
  if (event.event === "error") throw fromErrorRecord(event.error);
  if (event.event !== "embedded") throw new Error(`embeddings were answered with ${event.event}`);
  const width = event.vectors[0]?.length ?? 0;
  if (dimensions != null && dimensions > width)
    throw new RequestError(`dimensions must be from 1 to ${width}, not ${dimensions}`, "dimensions");
  const data = event.vectors.map((vector, index) => {
    const made = unit(vector.subarray(0, dimensions ?? width));
    const embedding = request.encoding_format === "base64" ? base64(made) : Array.from(made);
    return { object: "embedding" as const, index, embedding };
  });
  const usage = { prompt_tokens: event.tokens, total_tokens: event.tokens };
  return { object: "list", data, model, usage };
}

/** Copies the inputs, because a framework that watches its objects gives proxies, which cannot be sent. */
function inputsOf(input: EmbeddingRequest["input"]): EmbeddingInputs {
  if (typeof input === "string") return [input];
  if (typeof input[0] === "number") return [[...(input as readonly number[])]];
  return (input as EmbeddingInputs).map((one) => (typeof one === "string" ? one : [...one]));
}

/** The vector scaled to length 1 (L2); zeros stay zeros. */
function unit(vector: Float32Array): Float32Array<ArrayBuffer> {
  const length = Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
  return Float32Array.from(vector, (value) => value / Math.max(length, 1e-12));
}

/** The vector's little-endian float32 as base64. */
function base64(vector: Float32Array): string {
  const view = new DataView(new ArrayBuffer(vector.length * 4));
  vector.forEach((value, i) => {
    view.setFloat32(i * 4, value, true);
  });
  return btoa(Array.from(new Uint8Array(view.buffer), (byte) => String.fromCharCode(byte)).join(""));
}
