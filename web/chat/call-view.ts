/** The calls of tools in an answer: one line each, which opens to the arguments and the result. */

import type { Call } from "./tools.js";

/** Shows the calls of an answer, round by round. */
export function showCalls(box: HTMLElement, rounds: readonly (readonly Call[])[]): void {
  const calls = rounds.flat();
  box.hidden = calls.length === 0;
  // Existing lines stay as they are: somebody may have opened one.
  for (const call of calls.slice(box.childElementCount)) box.append(line(call));
}

function line({ name, arguments: given, result, failed }: Call): HTMLElement {
  const node = document.createElement("details");
  const summary = document.createElement("summary");
  const asked = document.createElement("pre");
  node.className = failed ? "call failed" : "call";
  summary.textContent = `${name} → ${result}`;
  asked.textContent = `${name}(${compact(given)})\n→ ${result}`;
  asked.tabIndex = 0;
  node.append(summary, asked);
  return node;
}

/** Removes the blanks that a model may put into JSON. */
function compact(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text;
  }
}
