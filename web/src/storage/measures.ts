/** What first loads of this origin have measured, for predictions of others. Pages keep it; workers cannot. */

type Measure = `speed ${string}` | `compile ${string}`;

/** Missing in workers and Node, where asking for it may warn; refused in frames that may keep nothing. */
function storage(): Storage | undefined {
  try {
    return "document" in globalThis ? globalThis.localStorage : undefined;
  } catch {
    return undefined;
  }
}

/** Bytes a second of downloads from an origin. */
export function speedOf(url: URL): Measure {
  return `speed ${url.origin}`;
}

/** Seconds that a kernel takes to be compiled, several at a time, by the adapter of that name. */
export function compilingOn(adapter: string): Measure {
  return `compile ${adapter}`;
}

/** Null where nothing was measured. */
export function measured(what: Measure): number | null {
  const value = Number(storage()?.getItem(`nearfar.${what}`));
  return value > 0 && Number.isFinite(value) ? value : null;
}

/** Keeps it for the next time; what is no measure is not kept. */
export function keepMeasure(what: Measure, value: number): void {
  if (!(value > 0 && Number.isFinite(value))) return;
  try {
    storage()?.setItem(`nearfar.${what}`, value.toPrecision(3));
  } catch {
    // Full: the next load predicts from less.
  }
}
