/** How much of the model's context the chat takes. */

import type { Engine } from "../src/page/index.js";
import type { ChatMessage } from "../src/protocol/openai.js";
import { element } from "./dom.js";
import { formatCount } from "./format.js";

/** Fraction of the context from which the meter warns. */
const HIGH = 0.85;

interface Counted {
  messages(calls: boolean): readonly ChatMessage[];
  readonly isPlain: boolean;
}

/** Counts again; hides the meter where nothing can be counted. */
export async function showContext(engine: Engine, chat: Counted): Promise<void> {
  const box = element("context", HTMLElement);
  const { contextLength, features } = engine.model;
  const messages = chat.messages(features.includes("tools"));
  try {
    const tokens = messages.length === 0 || chat.isPlain ? 0 : await engine.countTokens(messages);
    box.hidden = tokens === 0;
    const meter = element("context-meter", HTMLMeterElement);
    meter.max = contextLength;
    meter.high = contextLength * HIGH;
    meter.value = Math.min(tokens, contextLength);
    element("context-text", HTMLElement).textContent =
      `Context: ${formatCount(tokens)} of ${formatCount(contextLength)} tokens`;
  } catch {
    // A template may refuse half a chat, or the device was lost: the next answer reports it.
    box.hidden = true;
  }
}
