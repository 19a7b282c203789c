/**
 * How long the fuzz tests look: `runs` in `npm test`, NEARFAR_FUZZ times as many in `make fuzz`; the same
 * ones each time in the first.
 */
export function effort(runs = 100): { numRuns: number; seed?: number } {
  const times = Number(process.env["NEARFAR_FUZZ"] ?? "1");
  return times === 1 ? { numRuns: runs, seed: 1 } : { numRuns: runs * times };
}
