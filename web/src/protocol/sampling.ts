/** Fields that say how tokens are chosen: chat completions and responses have the same ones. */
export const SAMPLING = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
  "stop",
] as const;
