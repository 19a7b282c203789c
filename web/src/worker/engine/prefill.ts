/**
 * How prompts share the rows of a step: what edge_runtime/engine/prefill.py says, in TypeScript. Both read
 * tests/vectors/prefill/shares.json.
 */

/**
 * How many requests may be admitted past one that finds no room for its pages; then that one is next.
 */
export const OVERTAKEN = 32;

/** Rows of a step that are kept for prompts much shorter than the oldest. */
export function keptRows(budget: number): number {
  return Math.floor(budget / 4);
}

/** Whether a prompt with so many rows to compute may have some of those that are kept. */
export function isShort(rows: number, oldest: number): boolean {
  return rows * 2 <= oldest;
}

/**
 * Rows for each prompt, the oldest first, of those that it still wants. Prompts of one length are computed one
 * after the other; a quarter of the rows goes to prompts much shorter than the oldest, the shortest first.
 */
export function shareRows(wanted: readonly number[], budget: number): number[] {
  const shares = wanted.map(() => 0);
  let kept = keptRows(budget);
  const [oldest = 0, ...others] = wanted;
  const byLength = others.map((rows, at) => ({ rows, index: at + 1 })).sort((a, b) => a.rows - b.rows);
  for (const { rows, index } of byLength) {
    if (!isShort(rows, oldest)) break;
    const share = Math.min(rows, kept);
    shares[index] = share;
    kept -= share;
  }
  let left = budget - shares.reduce((sum, share) => sum + share, 0);
  return shares.map((share, index) => {
    const more = Math.min((wanted[index] ?? 0) - share, left);
    left -= more;
    return share + more;
  });
}
