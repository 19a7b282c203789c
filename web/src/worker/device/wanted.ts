import type { Program } from "../../artifact/manifest.js";
import { KV_BITS } from "../../format/constants.js";
import { RequestError } from "../../protocol/errors.js";

/** The wish for a program: its name, and the bits of a value in its cache. */
export interface ProgramWish {
  readonly program?: string | undefined;
  readonly kvBits?: number | undefined;
}

/**
 * The programs that match the wish; without a wish, the programs with the widest cache: floats before codes.
 * edge_runtime/artifact/reader.py does the same.
 *
 * @throws RequestError if no program matches.
 */
export function wantedPrograms(
  programs: readonly Program[],
  { program: pinned, kvBits }: ProgramWish,
): readonly Program[] {
  const named = programs.filter(({ name }) => pinned === undefined || name === pinned);
  if (named.length === 0)
    throw new RequestError(
      `The artifact has the programs ${programs.map(({ name }) => name).join(", ")}, not ${pinned}.`,
      "program",
    );
  if (kvBits !== undefined) return ofBits(named, kvBits);
  const widest = Math.max(...named.map(rank));
  return pinned === undefined ? named.filter((program) => rank(program) === widest) : named;
}

/** The programs with a cache of `bits` bits; 16 stands for floats of either size. */
function ofBits(programs: readonly Program[], bits: number): readonly Program[] {
  const found = programs.filter((program) => rank(program) === bits);
  if (found.length > 0) return found;
  const there = [...new Set(programs.map(({ kvDtype }) => kvDtype))].join(", ");
  const isKnown = Object.values<number>(KV_BITS).includes(bits);
  const advice = isKnown ? `, or build one: nearfar build … --kv-bits 16,${bits}` : "";
  throw new RequestError(
    `The artifact has no program with a KV cache of ${bits} bits, only of ${there}: leave kvBits out${advice}.`,
    "kvBits",
  );
}

function rank({ kvDtype }: Program): number {
  return kvDtype === "int8" || kvDtype === "int4" ? KV_BITS[kvDtype] : 16;
}
