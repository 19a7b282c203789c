/**
 * Loads whose page was closed or left meanwhile. The worker notes which program it tries, and whoever finds
 * that note later takes the program for the one that brought the tab down; a page that is left says here that
 * nothing was amiss. At once and without a promise: nothing else gets done while a page is left.
 */

const STORAGE = "nearfar.left";
/** The last ones: a load that nobody asks about any more need not be known. */
const MOST = 16;

export function leftLoads(): string[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(STORAGE) ?? "[]");
    return Array.isArray(found) ? found.filter((load) => typeof load === "string") : [];
  } catch {
    return [];
  }
}

/** Says that a load ends by nobody's fault. */
export function noteLeft(load: string): void {
  write([...leftLoads().filter((other) => other !== load), load]);
}

/**
 * Says so when the page is left; returns what ends the watch. A page that nobody sees counts as left for as
 * long: the system may end it without a word.
 */
export function watchLeaving(load: string): () => void {
  const onHide = (): void => noteLeft(load);
  const onVisibility = (): void => {
    if (document.visibilityState === "hidden") noteLeft(load);
    else write(leftLoads().filter((other) => other !== load));
  };
  // Outside browsers nobody leaves.
  globalThis.addEventListener?.("pagehide", onHide);
  globalThis.document?.addEventListener("visibilitychange", onVisibility);
  return () => {
    globalThis.removeEventListener?.("pagehide", onHide);
    globalThis.document?.removeEventListener("visibilitychange", onVisibility);
  };
}

function write(loads: readonly string[]): void {
  try {
    localStorage.setItem(STORAGE, JSON.stringify(loads.slice(-MOST)));
  } catch {
    // Storage that is full or forbidden: one program less to choose from.
  }
}
