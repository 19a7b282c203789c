/**
 * The effort of the fuzz tests: `runs` in `npm test`, the same ones each time; NEARFAR_FUZZ times as many in
 * `make fuzz`.
 */
export function effort(runs = 100): { numRuns: number; seed?: number } {
  const times = Number(process.env["NEARFAR_FUZZ"] ?? "1");
  return times === 1 ? { numRuns: runs, seed: 1 } : { numRuns: runs * times };
}
