/** The parameters of the page's address: /?prompt=Once&max_tokens=60&temperature=0&raw=1 */

/** Sampling parameters; missing ones are left to the page's settings. */
export interface Sampling {
  readonly temperature?: number;
  readonly topP?: number;
  readonly maxTokens?: number;
  readonly seed?: number;
}

export interface Link {
  /** Null where the address has no prompt; with raw, an empty prompt is just BOS. */
  readonly prompt: string | null;
  readonly raw: boolean;
  readonly system: string | null;
  readonly sampling: Sampling;
}

/** Reads the query string; throws an Error that names the first parameter that is not a number. */
export function parseLink(query: string): Link {
  const params = new URLSearchParams(query);
  const temperature = numberOf(params, "temperature");
  const topP = numberOf(params, "top_p");
  const maxTokens = numberOf(params, "max_tokens");
  const seed = numberOf(params, "seed");
  return {
    prompt: params.get("prompt"),
    raw: flagOf(params, "raw"),
    system: params.get("system"),
    sampling: {
      ...(temperature !== undefined && { temperature }),
      ...(topP !== undefined && { topP }),
      ...(maxTokens !== undefined && { maxTokens }),
      ...(seed !== undefined && { seed }),
    },
  };
}

function numberOf(params: URLSearchParams, name: string): number | undefined {
  const text = params.get(name);
  if (text === null) return undefined;
  const value = Number(text);
  // The engine checks the ranges.
  if (text.trim() === "" || Number.isNaN(value))
    throw new Error(`${name}=${text} in the address is not a number`);
  return value;
}

function flagOf(params: URLSearchParams, name: string): boolean {
  const text = params.get(name);
  if (text === null || text === "0" || text === "false") return false;
  if (text === "" || text === "1" || text === "true") return true;
  throw new Error(`${name}=${text} in the address should be 0 or 1`);
}
