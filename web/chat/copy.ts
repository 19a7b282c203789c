/** The buttons of an answer, with one that copies a text and confirms it. */

import { say } from "./dom.js";

/** Milliseconds for which a button confirms that it copied. */
const SHOWN = 2000;

export function button(label: string, run: () => void): HTMLButtonElement {
  const node = document.createElement("button");
  node.type = "button";
  node.className = "small";
  node.textContent = label;
  node.addEventListener("click", run);
  return node;
}

export function copyButton(label: string, text: () => string): HTMLButtonElement {
  const tell = (what: string): void => {
    node.textContent = what;
    say(what);
    setTimeout(() => {
      node.textContent = label;
    }, SHOWN);
  };
  const node = button(label, () => {
    navigator.clipboard.writeText(text()).then(
      () => tell("Copied"),
      () => tell("The browser refused"),
    );
  });
  return node;
}
