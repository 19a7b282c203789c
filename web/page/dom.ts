/** The page's elements by id, checked, so that a renamed one fails at once and by name. */

export function element<T extends HTMLElement>(id: string, kind: new () => T): T {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no <${kind.name}> with id ${id}`);
  return found;
}

/** What tests and styles read: idle waits for the person, the others say what is going on or how it ended. */
export type PageState = "loading" | "idle" | "generating" | "done" | "error";

export function setState(state: PageState, spoken: string): void {
  document.body.dataset.state = state;
  // For screen readers, which see no progress bar fill and no cursor blink.
  element("status", HTMLParagraphElement).textContent = spoken;
}
