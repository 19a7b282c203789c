/**
 * Code that few pages need: embeddings, decisions, what a prompt shows, the measurement of a step, and the error
 * of a wrong task. A chunk of its own.
 */

export { checkedProfile, profileStep } from "../engine/profile.js";
export { embedAll } from "./embeddings.js";
export { Forced, labelTokens } from "./labels.js";
export { readPrompt } from "./prompt-scores.js";
export { wrongTask } from "./task.js";
