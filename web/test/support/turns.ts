/**
 * Cases that run in turns, like those of tests/support/turns.py: the content of the commit decides the turn,
 * NEARFAR_TURN=N repeats a turn, NEARFAR_TURN=all runs all.
 */

import { execFileSync } from "node:child_process";
import { WEB } from "./programs.js";

const TURNS = 5040n;

/** `count` of the cases in this turn, in their order. */
export function inTurns<T>(cases: readonly T[], count = 1): T[] {
  const given = process.env.NEARFAR_TURN;
  if (given === "all") return [...cases];
  if (given && !/^\d+$/.test(given))
    throw new Error(`NEARFAR_TURN=${given}: give a number that a run printed, or all`);
  const turn = given ? Number(given) : turnOfCommit();
  return cases.filter((_, at) => (at - (turn % cases.length) + cases.length) % cases.length < count);
}

function turnOfCommit(): number {
  try {
    const told = execFileSync("git", ["rev-parse", "HEAD^{tree}"], {
      cwd: WEB,
      stdio: ["ignore", "pipe", "ignore"],
    });
    return Number(BigInt(`0x${told.toString().trim()}`) % TURNS);
  } catch {
    // Outside of a git checkout.
    return 0;
  }
}
