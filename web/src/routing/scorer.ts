/** The difficulty model as the client takes it. Its code is a chunk of its own. */

import { later } from "../protocol/errors.js";
import type { DifficultyModel } from "./difficulty.js";
import type { Message } from "./openai.js";

/** Scores the difficulty of a conversation's next answer, 0 to 1; null where it is unknown. */
export type Scorer = (messages: readonly Message[]) => number | null;

export interface Difficulty extends Scorer {
  (messages: readonly Message[]): number;
  /** The difficulty of a prompt, from the prompt alone. */
  score(prompt: string): number;
}

/**
 * Loads the difficulty model from its address (`nearfar/routing/difficulty.json` in the package), or takes it
 * as it is.
 */
export async function loadDifficulty(source: DifficultyModel | URL | string): Promise<Difficulty> {
  const code = await later(() => import("./difficulty.js"), "The code of the difficulty model");
  const model = await code.loadDifficulty(source);
  const ofMessages = (messages: readonly Message[]): number => model.score(code.messagesToPrompt(messages));
  return Object.assign(ofMessages, { score: (prompt: string) => model.score(prompt) });
}
