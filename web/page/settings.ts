/** The settings form: how answers are drawn. */

import { element } from "./dom.js";
import type { Link, Sampling } from "./link.js";

export interface Settings {
  readonly sampling: Sampling;
  readonly system: string;
  readonly raw: boolean;
}

const FIELDS = { temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed" } as const;

function input(id: string): HTMLInputElement {
  return element(id, HTMLInputElement);
}

/** Puts what the address asks for into the form, where it can be seen and changed. */
export function applyLink(link: Link): void {
  for (const [key, id] of Object.entries(FIELDS)) {
    const value = link.sampling[key as keyof typeof FIELDS];
    if (value !== undefined) input(id).value = String(value);
  }
  if (link.system !== null) element("system", HTMLTextAreaElement).value = link.system;
  input("raw").checked = link.raw;
}

/** The form's values; throws an Error that names a field that is no number. */
export function readSettings(): Settings {
  const sampling: Sampling = {
    ...numberIn("temperature", FIELDS.temperature),
    ...numberIn("topP", FIELDS.topP),
    ...numberIn("maxTokens", FIELDS.maxTokens),
    ...numberIn("seed", FIELDS.seed),
  };
  return { sampling, system: element("system", HTMLTextAreaElement).value, raw: input("raw").checked };
}

function numberIn<K extends keyof Sampling>(key: K, id: string): Sampling {
  const field = input(id);
  if (field.validity.badInput)
    throw new Error(`the setting “${field.labels?.[0]?.textContent ?? id}” is no number`);
  // An empty field leaves the value to the engine.
  return field.value === "" ? {} : { [key]: field.valueAsNumber };
}
