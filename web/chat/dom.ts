/** The page's elements by id, checked, so that a renamed one fails at once and by name. */

export function element<T extends HTMLElement>(id: string, kind: new () => T): T {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no <${kind.name}> with id ${id}`);
  return found;
}

/** What tests and styles read: idle waits for the person, the others say what is going on or how it ended. */
export type PageState = "loading" | "idle" | "generating" | "done" | "error";

/** How long a text for screen readers stays. Milliseconds; a later search of the page should not find it. */
const SPOKEN = 7000;
let silence: ReturnType<typeof setTimeout> | undefined;

/** For screen readers, which see no progress bar fill and no cursor blink: read out once, and shown nowhere. */
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

/** Whether keys have no place on the page: nothing has the focus, or what had it is gone. */
export function isFocusLost(): boolean {
  const { activeElement } = document;
  return (
    !(activeElement instanceof HTMLElement) || activeElement === document.body || !isShown(activeElement)
  );
}

function isShown(node: HTMLElement): boolean {
  return node.isConnected && node.getClientRects().length > 0;
}
