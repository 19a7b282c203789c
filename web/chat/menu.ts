/** On a narrow screen chats, model and settings fold into one place behind a button. */

import { element } from "./dom.js";

export function openMenu(): void {
  const button = element("menu", HTMLButtonElement);
  const side = element("side", HTMLElement);
  const set = (open: boolean): void => {
    button.setAttribute("aria-expanded", String(open));
    side.toggleAttribute("data-open", open);
  };
  button.addEventListener("click", () => set(!side.hasAttribute("data-open")));
  // After choosing a chat the person wants to see it.
  for (const id of ["chats", "new-chat"])
    element(id, HTMLElement).addEventListener("click", (event) => {
      if ((event.target as HTMLElement).matches(".chat-title, #new-chat")) set(false);
    });
  // The covered page must not get keys while it cannot be seen.
  side.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget instanceof Node && !side.contains(relatedTarget)) set(false);
  });
  side.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !side.hasAttribute("data-open")) return;
    // Escape closes only the menu, and stops no answer.
    event.stopPropagation();
    set(false);
    button.focus();
  });
}
