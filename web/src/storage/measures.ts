/**
 * Measurements of this origin's first loads, for predictions of later ones. Pages store them, because workers
 * have no localStorage.
 */

type Measure = `speed ${string}` | `compile ${string}`;

/**
 * The storage; undefined in workers and Node, where asking for it may warn, and in frames that may store
 * nothing.
 */
function storage(): Storage | undefined {
  try {
    return "document" in globalThis ? globalThis.localStorage : undefined;
  } catch {
    return undefined;
  }
}

/** Key of the bytes per second of downloads from an origin. */
export function speedOf(url: URL): Measure {
  return `speed ${url.origin}`;
}

/** Key of the seconds per compiled kernel, several at a time, on the adapter of that name. */
export function compilingOn(adapter: string): Measure {
  return `compile ${adapter}`;
}

/** A stored measurement; null where there is none. */
export function measured(what: Measure): number | null {
  const value = Number(storage()?.getItem(`nearfar.${what}`));
  return value > 0 && Number.isFinite(value) ? value : null;
}

/** Stores a measurement for the next time; invalid values are not stored. */
export function keepMeasure(what: Measure, value: number): void {
  if (!(value > 0 && Number.isFinite(value))) return;
  try {
    storage()?.setItem(`nearfar.${what}`, value.toPrecision(3));
  } catch {
    // Storage is full: the next load predicts from less.
  }
}
