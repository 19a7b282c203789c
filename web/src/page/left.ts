/**
 * Notes loads whose page was closed or left. The worker stores which program it tries, and a later load that
 * finds the note concludes that this program crashed the tab; a page that is left writes here that it did not
 * crash. It writes synchronously, because nothing else completes while a page is left. Each load has its own
 * entry, so that pages that are left together do not overwrite each other's.
 */

const PREFIX = "nearfar.left.";
/** The number of entries that are kept; older loads need not be known. */
const MOST = 16;
/** Milliseconds to wait: a page's last entry may reach other tabs after its lock is free. */
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

/** Notes that a load ended without a crash. */
export function noteLeft(load: string): void {
  try {
    localStorage.setItem(PREFIX + load, String(Date.now()));
    const when = (key: string): number => Number(localStorage.getItem(key));
    const noted = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    const old = noted.sort((a, b) => when(b) - when(a)).slice(MOST);
    for (const key of old) localStorage.removeItem(key);
  } catch {
    // Storage is full or forbidden: there will be one program less to choose from.
  }
}

/**
 * Notes when the page is left; returns what stops the watch. A hidden page counts as left while it is hidden:
 * the system may end it without an event.
 */
export function watchLeaving(load: string): () => void {
  const settled = new AbortController();
  const { signal } = settled;
  const onVisibility = (): void => {
    if (document.visibilityState === "hidden") noteLeft(load);
    else forget(load);
  };
  if (globalThis.document?.visibilityState === "hidden") noteLeft(load);
  // Outside browsers there is no page to leave.
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
    // Without storage there is no entry.
  }
}
