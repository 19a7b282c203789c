/** The settings form: how answers are generated. */

import { element } from "./dom.js";
import type { Link, Sampling } from "./link.js";

/** The format of an answer, as in `response_format`. */
export type Format =
  | { readonly type: "json_object" }
  | {
      readonly type: "json_schema";
      readonly json_schema: { readonly name: string; readonly schema: object };
    };

export interface Settings {
  readonly sampling: Sampling;
  /** The format; null for any text. */
  readonly format: Format | null;
  /** Whether the page's tools are offered. */
  readonly tools: boolean;
  readonly system: string;
  readonly raw: boolean;
}

const FIELDS = { temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed" } as const;

function input(id: string): HTMLInputElement {
  return element(id, HTMLInputElement);
}

const STORAGE = "nearfar.settings";
const KEPT = [...Object.values(FIELDS), "system", "format", "schema"];
type Field = HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement;

/** Fills the form with stored values, then with the address's; stores what a person changes. */
export function openSettings(link: Link): void {
  const kept = readKept();
  for (const id of KEPT) {
    const field = element(id, HTMLElement) as Field;
    const value = kept[id];
    if (value !== undefined) field.value = value;
    // Each field is stored alone: the values that a link filled in are nobody's choice.
    field.addEventListener("change", () => keep(id, field.value));
  }
  input("tools").checked = kept["tools"] === "on";
  input("tools").addEventListener("change", () => keep("tools", input("tools").checked ? "on" : "off"));
  applyLink(link);
  element("format", HTMLSelectElement).addEventListener("change", showSchema);
  showSchema();
}

/** Offers answers in JSON where the device or the cloud supports them. */
export function offerFormats(able: boolean): void {
  element("formats", HTMLElement).hidden = !able;
}

/** Offers the page's tools where the model can call tools; else says that it cannot. */
export function offerTools(able: boolean): void {
  input("tools").disabled = !able;
  element("tools-hint", HTMLParagraphElement).textContent = able
    ? "A calculator, the date and time, units: computed in this page."
    : "This model cannot call tools.";
}

/** Shows why the tools are unavailable. */
export function refuseTools(why: string): void {
  input("tools").disabled = true;
  element("tools-hint", HTMLParagraphElement).textContent = why;
}

function showSchema(): void {
  element("schema-field", HTMLElement).hidden = element("format", HTMLSelectElement).value !== "json_schema";
}

function readKept(): Record<string, string | undefined> {
  try {
    const kept: unknown = JSON.parse(localStorage.getItem(STORAGE) ?? "{}");
    return Object.fromEntries(Object.entries(kept ?? {}).filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}

function keep(id: string, value: string): void {
  try {
    localStorage.setItem(STORAGE, JSON.stringify({ ...readKept(), [id]: value }));
  } catch {
    // Storage that is full or forbidden: the settings hold for this visit.
  }
}

/** Puts the values of the address into the form, where they can be seen and changed. */
function applyLink(link: Link): void {
  for (const [key, id] of Object.entries(FIELDS)) {
    const value = link.sampling[key as keyof typeof FIELDS];
    if (value !== undefined) input(id).value = String(value);
  }
  if (link.system !== null) element("system", HTMLTextAreaElement).value = link.system;
  input("raw").checked = link.raw;
}

/** Returns the form's values. Throws an Error that names a field with a wrong value. */
export function readSettings(): Settings {
  const format = readFormat();
  const raw = input("raw").checked;
  if (raw && format)
    throw new Error("A continued text is not JSON: switch off one of the two in the settings.");
  const tools = input("tools").checked && !input("tools").disabled;
  if (tools && (raw || format))
    throw new Error(
      `${raw ? "A text that is continued" : "An answer in JSON"} calls no tools: switch off one of the two in ` +
        "the settings.",
    );
  const sampling: Sampling = {
    ...numberIn("temperature", FIELDS.temperature),
    ...numberIn("topP", FIELDS.topP),
    ...numberIn("maxTokens", FIELDS.maxTokens),
    ...numberIn("seed", FIELDS.seed),
  };
  return { sampling, format, tools, system: element("system", HTMLTextAreaElement).value, raw };
}

function readFormat(): Format | null {
  const { value } = element("format", HTMLSelectElement);
  if (element("formats", HTMLElement).hidden || value === "text") return null;
  if (value === "json_object") return { type: "json_object" };
  const schema = parsed(element("schema", HTMLTextAreaElement).value);
  return { type: "json_schema", json_schema: { name: "answer", schema } };
}

function parsed(text: string): object {
  try {
    const schema: unknown = JSON.parse(text);
    if (typeof schema === "object" && schema !== null && !Array.isArray(schema)) return schema;
  } catch {
    // The error is thrown below, as for everything that is not an object.
  }
  throw new Error('The schema in the settings must be a JSON object, such as {"type": "object"}.');
}

function numberIn<K extends keyof Sampling>(key: K, id: string): Sampling {
  const field = input(id);
  if (field.validity.badInput)
    throw new Error(`the setting “${field.labels?.[0]?.textContent ?? id}” is not a number`);
  // The engine chooses the value of an empty field.
  return field.value === "" ? {} : { [key]: field.valueAsNumber };
}
