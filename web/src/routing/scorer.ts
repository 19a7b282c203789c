/**
 * The difficulty model as the client takes it. Its code comes with its weights, and only where they are asked
 * for.
 */

import { unloaded } from "../both/errors.js";
import type { DifficultyModel } from "./difficulty.js";
import type { Message } from "./openai.js";

/** How difficult a conversation's next answer is, 0 to 1; null where that cannot be said. */
export type Scorer = (messages: readonly Message[]) => number | null;

export interface Difficulty extends Scorer {
  (messages: readonly Message[]): number;
  /** Of a prompt alone. */
  score(prompt: string): number;
}

/**
 * Loads the difficulty model from its address (`nearfar/routing/difficulty.json` in the package), or takes it
 * as it is.
 */
export async function loadDifficulty(source: DifficultyModel | URL | string): Promise<Difficulty> {
  const { loadDifficulty: load, messagesToPrompt } = await import("./difficulty.js").catch(
    unloaded("loadDifficulty"),
  );
  const model = await load(source);
  const ofMessages = (messages: readonly Message[]): number => model.score(messagesToPrompt(messages));
  return Object.assign(ofMessages, { score: (prompt: string) => model.score(prompt) });
}
