/** Code that few pages need: embeddings, decisions, and the measurement of a step. A chunk of its own. */

export { checkedProfile, profileStep } from "../engine/profile.js";
export { embedAll } from "./embeddings.js";
export { Forced, labelTokens } from "./labels.js";
