/** From log-probabilities of labels to a decision, as edge_runtime/openai/label_odds.py does it. */

export interface Odds {
  /** The probability of each label among all labels. */
  readonly probabilities: readonly number[];
  /** 0 where all labels are equally likely, 1 where one has everything. */
  readonly confidence: number;
  /** The index of the likeliest label, the first on ties. */
  readonly choice: number;
}

/** The tokens of a label; only their equality matters. */
export type Label = readonly (string | number)[];

/** The logarithm of a probability that has become nothing, so that two of them can be compared. */
const FLOOR = -1e4;

/**
 * Normalizes the probabilities of labels that answer a prompt. Where a label begins another ("1" and "10"), its
 * probability is that of an answer which begins with it and not with a longer one. `neutral`: log-probabilities
 * after a prompt without content; dividing by them takes out what the model prefers whatever it is asked.
 */
export function labelOdds(
  labels: readonly Label[],
  logprobs: readonly number[],
  neutral: readonly number[] | null = null,
): Odds {
  const before = neutral && alone(labels, neutral);
  const weights = alone(labels, logprobs).map((weight, at) => weight - (before?.[at] ?? 0));
  const most = Math.max(...weights);
  const shares = weights.map((weight) => Math.exp(weight - most));
  const total = shares.reduce((sum, share) => sum + share, 0);
  const probabilities = shares.map((share) => share / total);
  const best = Math.max(...probabilities);
  const count = labels.length;
  const confidence = count === 1 ? 1 : Math.min(Math.max((best * count - 1) / (count - 1), 0), 1);
  return { probabilities, confidence, choice: probabilities.indexOf(best) };
}

/** The logarithm of the probability that an answer begins with each label and with no longer one. */
function alone(labels: readonly Label[], logprobs: readonly number[]): number[] {
  return labels.map((label, at) => {
    const logprob = logprobs[at] ?? FLOOR;
    const longer = labels.flatMap((other, index) => (begins(label, other) ? [index] : []));
    // Of labels that begin each other, only the shortest counts: it contains the longer ones.
    const nearest = longer.filter((o) => !longer.some((p) => begins(labels[p] ?? [], labels[o] ?? [])));
    const once = new Map(nearest.map((o) => [JSON.stringify(labels[o]), logprobs[o] ?? FLOOR]));
    let rest = 1;
    for (const other of once.values()) rest -= Math.exp(Math.min(other - logprob, 0));
    return rest > 1e-12 ? Math.max(logprob + Math.log(rest), FLOOR) : FLOOR;
  });
}

function begins(label: Label, other: Label): boolean {
  return label.length < other.length && label.every((token, at) => token === other[at]);
}
