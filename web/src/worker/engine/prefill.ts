/**
 * How prompts share the rows of a step. edge_runtime/engine/prefill.py does the same;
 * tests/vectors/prefill/shares.json tests both.
 */

/**
 * The most requests that may be admitted past one that finds no room for its pages; then that request is
 * next.
 */
export const OVERTAKEN = 32;

/** The rows of a step that are kept for prompts much shorter than the oldest. */
export function keptRows(budget: number): number {
  return Math.floor(budget / 4);
}

/** Whether a prompt with `rows` rows to compute may use the kept rows. */
export function isShort(rows: number, oldest: number): boolean {
  return rows * 2 <= oldest;
}

/**
 * The number of rows for each prompt; `wanted` has the rows that the prompts still need, the oldest prompt
 * first. Prompts of one length are computed one after the other; a quarter of the rows goes to prompts much
 * shorter than the oldest, the shortest first.
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
