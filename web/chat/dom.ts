/** The page's elements by id, checked, so that a renamed one fails at once and by name. */

export function element<T extends HTMLElement>(id: string, kind: new () => T): T {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no <${kind.name}> with id ${id}`);
  return found;
}

/**
 * The page's state, which tests and styles read: idle waits for the person, the others say what is going on
 * or how it ended.
 */
export type PageState = "loading" | "idle" | "generating" | "done" | "error";

/** Milliseconds for which a text for screen readers stays; a later search of the page should not find it. */
const SPOKEN = 7000;
let silence: ReturnType<typeof setTimeout> | undefined;

/** Reads a text out to screen readers, which cannot see a progress bar or a cursor. It is not visible. */
export function say(text: string): void {
  const status = element("status", HTMLParagraphElement);
  status.textContent = text;
  clearTimeout(silence);
  silence = setTimeout(() => {
    status.textContent = "";
  }, SPOKEN);
}

export function setState(state: PageState, spoken: string): void {
  document.body.dataset.state = state;
  say(spoken);
}

/** Whether no element has the focus, or the focused one is gone. */
export function isFocusLost(): boolean {
  const { activeElement } = document;
  return (
    !(activeElement instanceof HTMLElement) || activeElement === document.body || !isShown(activeElement)
  );
}

function isShown(node: HTMLElement): boolean {
  return node.isConnected && node.getClientRects().length > 0;
}
