/** Whether the page's tools fit a model: their descriptions take room in every prompt. */

import type { Engine } from "../src/page/index.js";
import { element } from "./dom.js";
import { formatCount } from "./format.js";
import { refuseTools } from "./settings.js";
import { OFFERED } from "./tools.js";

/** Tokens that a question with tools needs beside them at least: its own, a call, what that gives, an answer. */
const LEAST_ROOM = 128;

/** What stands in the way of tools that take so many tokens; null where nothing does. */
export function toolsLack(tokens: number, context: number): string | null {
  if (tokens + LEAST_ROOM <= context) return null;
  return (
    `This model's context of ${formatCount(context)} tokens is too short for the tools: describing them takes ` +
    `${formatCount(tokens)}.`
  );
}

/**
 * Takes the tools back where they do not fit this device's model and nobody else answers. Once the settings are
 * opened, or at once where the tools are on: what counts them is loaded for it.
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
      // A device that was lost, a template that refuses tools: the next answer says so.
    }
  };
  if (box.checked) void look();
  else element("settings", HTMLDetailsElement).addEventListener("toggle", () => void look(), { once: true });
}
