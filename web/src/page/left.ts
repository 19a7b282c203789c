/**
 * Loads whose page was closed or left meanwhile. The worker notes which program it tries, and whoever finds
 * that note later takes the program for the one that brought the tab down; a page that is left says here
 * that nothing was amiss. At once and without a promise: nothing else gets done while a page is left. Each
 * load has an entry of its own, so that pages that are left together do not overwrite each other's word.
 */

const PREFIX = "nearfar.left.";
/** The last ones: a load that nobody asks about any more need not be known. */
const MOST = 16;
/** What a page says as it ends may come to other tabs later than that it has ended. */
const LAST_WORD_MS = 1000;

/** Whether the page of a load that has ended was left. */
export async function hasLeft(load: string): Promise<boolean> {
  if (isNoted(load)) return true;
  const settled = new AbortController();
  await new Promise<void>((resolve) => {
    const onStorage = ({ key }: StorageEvent): void => {
      if (key === PREFIX + load) resolve();
    };
    globalThis.addEventListener?.("storage", onStorage, { signal: settled.signal });
    setTimeout(resolve, LAST_WORD_MS);
  });
  settled.abort();
  return isNoted(load);
}

/** Says that a load ends by nobody's fault. */
export function noteLeft(load: string): void {
  try {
    localStorage.setItem(PREFIX + load, String(Date.now()));
    const when = (key: string): number => Number(localStorage.getItem(key));
    const noted = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    const old = noted.sort((a, b) => when(b) - when(a)).slice(MOST);
    for (const key of old) localStorage.removeItem(key);
  } catch {
    // Storage that is full or forbidden: one program less to choose from.
  }
}

/**
 * Says so when the page is left; returns what ends the watch. A page that nobody sees counts as left for as
 * long: the system may end it without a word.
 */
export function watchLeaving(load: string): () => void {
  const settled = new AbortController();
  const { signal } = settled;
  const onVisibility = (): void => {
    if (document.visibilityState === "hidden") noteLeft(load);
    else forget(load);
  };
  if (globalThis.document?.visibilityState === "hidden") noteLeft(load);
  // Outside browsers nobody leaves.
  globalThis.addEventListener?.("pagehide", () => noteLeft(load), { signal });
  globalThis.document?.addEventListener("visibilitychange", onVisibility, { signal });
  return () => settled.abort();
}

function isNoted(load: string): boolean {
  try {
    return localStorage.getItem(PREFIX + load) !== null;
  } catch {
    return false;
  }
}

function forget(load: string): void {
  try {
    localStorage.removeItem(PREFIX + load);
  } catch {
    // Nothing can be there.
  }
}
