/** The box that shows an error and what to do. */

import { ArtifactError, CloudError, DeviceError, RequestError, RouteError } from "../src/protocol/errors.js";
import { describeReason } from "../src/routing/reasons.js";
import type { Reason } from "../src/routing/types.js";
import { element } from "./dom.js";
import type { Help } from "./webgpu-help.js";

export interface Action {
  readonly label: string;
  run(): void;
}

export function showNotice(help: Help, action: Action | null = null): void {
  element("notice-title", HTMLHeadingElement).textContent = help.title;
  element("notice-text", HTMLParagraphElement).textContent = help.text;
  const list = element("notice-list", HTMLUListElement);
  list.hidden = help.steps.length === 0;
  list.replaceChildren(
    ...help.steps.map((step) => {
      const item = document.createElement("li");
      item.textContent = step;
      return item;
    }),
  );
  const button = element("notice-action", HTMLButtonElement);
  button.hidden = action === null;
  button.textContent = action?.label ?? "";
  button.onclick = () => action?.run();
  element("notice", HTMLElement).hidden = false;
}

export function hideNotice(): void {
  element("notice", HTMLElement).hidden = true;
}

/**
 * Explains an error: the title names the cause, the text is the error's own. `alone`: there is no cloud, so
 * it is not mentioned.
 */
export function explain(error: unknown, alone = false): Help {
  if (alone && error instanceof RouteError && Array.isArray(error.cause)) return ofDevice(error.cause);
  const text = error instanceof Error ? error.message : String(error);
  return { title: titleOf(error), text, steps: [] };
}

/** Explains why the device alone does not answer. */
function ofDevice(reasons: readonly Reason[]): Help {
  const own = reasons.filter(({ side }) => side !== "cloud").map((reason) => ({ ...reason, side: null }));
  const isLong = own.some(({ code }) => code === "context" || code === "kv_memory");
  return {
    title: isLong ? "This is too long for the model" : "This device does not answer now",
    text: `${own.map(describeReason).join("; ")}.`,
    steps: isLong ? ["Start a new chat, or shorten the message.", "Switch the tools off in Settings."] : [],
  };
}

function titleOf(error: unknown): string {
  if (error instanceof ArtifactError) return "The model's files cannot be used";
  if (error instanceof DeviceError) return "This device cannot run the model";
  if (error instanceof CloudError) return "The cloud cannot answer";
  if (error instanceof RouteError) return "Neither device nor cloud may answer this";
  if (error instanceof RequestError) return "The request cannot be answered";
  return "Something went wrong";
}
