/** The loaded model as the page needs it: one answer at a time, as text that arrives in pieces. */

import { createEngine, type LoadProgress } from "../src/index.js";
import { type Manifest, parseManifest } from "../src/manifest.js";
import { fetchText } from "../src/store/http.js";
import type { ChatMessage } from "../src/text/types.js";
import type { Sampling } from "./link.js";

export type Question = { readonly prompt: string } | { readonly messages: readonly ChatMessage[] };

/** How an answer ended and what it cost; times in milliseconds. */
export interface Outcome {
  readonly reason: "stop" | "length" | "aborted";
  readonly tokens: number;
  readonly ttft: number | null;
  /** Tokens per second after the first token; null where there were not enough of them. */
  readonly rate: number | null;
}

export interface Model {
  readonly name: string;
  /** "f16 on NVIDIA …": the precision of the kernels and the device that runs them. */
  readonly runsOn: string;
  /** Rejects with the engine's errors; an abort is an outcome. */
  answer(question: Question, sampling: Sampling, onText: (text: string) => void, signal: AbortSignal): Promise<Outcome>;
}

export async function readManifest(artifact: URL): Promise<Manifest> {
  return parseManifest(await fetchText(new URL("manifest.json", artifact), null, { cache: "no-cache" }));
}

export async function openModel(artifact: URL, onProgress: (progress: LoadProgress) => void): Promise<Model> {
  const engine = await createEngine(artifact, { onProgress });
  // For the browser's console, and for tests.
  Object.assign(window, { nearfar: { engine, createEngine, artifact } });

  return {
    name: engine.model.name,
    runsOn: `${engine.model.precision} on ${engine.model.adapter}`,
    async answer(question, { temperature, topP, maxTokens, seed }, onText, signal) {
      const options = {
        ...(temperature !== undefined && { temperature }),
        ...(topP !== undefined && { top_p: topP }),
        ...(maxTokens !== undefined && { max_tokens: maxTokens }),
        ...(seed !== undefined && { seed }),
        stream: true as const,
        signal,
      };
      let reason: Outcome["reason"] = "stop";
      try {
        if ("prompt" in question) {
          for await (const chunk of await engine.completions.create({ ...options, ...question })) {
            const choice = chunk.choices[0];
            onText(choice?.text ?? "");
            reason = choice?.finish_reason ?? reason;
          }
        } else {
          for await (const chunk of await engine.chat.completions.create({ ...options, ...question })) {
            const choice = chunk.choices[0];
            onText(choice?.delta.content ?? "");
            reason = choice?.finish_reason ?? reason;
          }
        }
      } catch (error) {
        if (!signal.aborted) throw error;
        // What was written until then stays; its cost is not known.
        return { reason: "aborted", tokens: 0, ttft: null, rate: null };
      }
      const { last } = await engine.stats();
      return {
        reason,
        tokens: last?.completionTokens ?? 0,
        ttft: last?.ttft ?? null,
        rate: last?.decodeTokensPerSecond || null,
      };
    },
  };
}
