/** Checks whether the page's tools fit a model: their descriptions take room in every prompt. */

import type { Engine } from "../src/page/index.js";
import { element } from "./dom.js";
import { formatCount } from "./format.js";
import { refuseTools } from "./settings.js";
import { OFFERED } from "./tools.js";

/** Least tokens for a question in addition to the tools: its own, a call, its result, an answer. */
const LEAST_ROOM = 128;

/** Why tools of `tokens` tokens do not fit; null where they do. */
export function toolsLack(tokens: number, context: number): string | null {
  if (tokens + LEAST_ROOM <= context) return null;
  return (
    `This model's context of ${formatCount(context)} tokens is too short for the tools: describing them takes ` +
    `${formatCount(tokens)}.`
  );
}

/**
 * Disables the tools where they do not fit this device's model and nobody else answers. It counts when the
 * settings are opened, or at once where the tools are on, since counting loads code.
 */
export function limitTools(engine: Engine, canLeave: () => boolean): void {
  const box = element("tools", HTMLInputElement);
  const look = async (): Promise<void> => {
    if (box.disabled || canLeave()) return;
    try {
      const tokens = await engine.countTokens([{ role: "user", content: "?" }], { tools: OFFERED });
      const lacking = toolsLack(tokens, engine.model.contextLength);
      if (lacking !== null) refuseTools(lacking);
    } catch {
      // The device was lost, or the template refuses tools: the next answer reports it.
    }
  };
  if (box.checked) void look();
  else element("settings", HTMLDetailsElement).addEventListener("toggle", () => void look(), { once: true });
}
