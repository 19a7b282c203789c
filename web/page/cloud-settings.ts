/** Where answers may come from: the form, and what of it the browser keeps. */

import { MODES, type Mode } from "../src/routing/types.js";
import { element } from "./dom.js";

export interface CloudSettings {
  readonly mode: Mode;
  /** Empty: none. */
  readonly address: string;
  readonly key: string;
}

/** `preset`: the address that `nearfar web --cloud` named when this was kept. */
interface Kept extends CloudSettings {
  readonly preset: string | null;
}

const STORAGE = "nearfar.cloud";
const mode = element("mode", HTMLSelectElement);
const address = element("cloud-address", HTMLInputElement);
const key = element("cloud-key", HTMLInputElement);
let preset: string | null = null;

/** Fills the form with what is kept, and tells of every change. */
export async function openCloudSettings(onChange: (settings: CloudSettings) => void): Promise<void> {
  preset = await readPreset();
  const kept = read();
  mode.value = kept.mode;
  address.value = kept.address;
  key.value = kept.key;
  // A key is for one server: it does not follow to another one.
  let keysOwner = originOf(kept.address);
  address.addEventListener("change", () => {
    if (originOf(address.value.trim()) !== keysOwner) key.value = "";
  });
  key.addEventListener("change", () => {
    keysOwner = originOf(address.value.trim());
  });
  const changed = (): void => {
    const settings = settingsNow();
    keep({ ...settings, preset });
    show(settings);
    onChange(settings);
  };
  for (const field of [mode, address, key]) field.addEventListener("change", changed);
  const settings = settingsNow();
  show(settings);
  onChange(settings);
}

function settingsNow(): CloudSettings {
  const chosen = MODES.find((candidate) => candidate === mode.value) ?? "auto";
  return { mode: chosen, address: address.checkValidity() ? address.value.trim() : "", key: key.value };
}

function show({ mode, address }: CloudSettings): void {
  const stays = address === "" || mode === "device_only";
  const host = stays ? "" : new URL(address).host;
  element("privacy", HTMLParagraphElement).textContent = stays
    ? "Runs on this device. What you write never leaves it."
    : mode === "cloud_only" || mode === "prefer_cloud"
      ? `What you write is sent to ${host}.`
      : `What this device should not answer is sent to ${host}, with the chat before it.`;
}

async function readPreset(): Promise<string | null> {
  try {
    const response = await fetch("config.json");
    const { cloud } = (await response.json()) as { cloud?: unknown };
    return typeof cloud === "string" ? cloud : null;
  } catch {
    // A plain static server has no such file.
    return null;
  }
}

function read(): Kept {
  const fresh: Kept = { mode: "auto", address: preset ?? "", key: "", preset };
  try {
    const kept = { ...fresh, ...(JSON.parse(localStorage.getItem(STORAGE) ?? "{}") as Partial<Kept>) };
    // Another --cloud than last time was meant; what was typed for the old one is not for it.
    return preset !== null && kept.preset !== preset ? { ...fresh, mode: kept.mode } : kept;
  } catch {
    return fresh;
  }
}

function keep(settings: Kept): void {
  try {
    localStorage.setItem(STORAGE, JSON.stringify(settings));
  } catch {
    // Storage that is full or forbidden: the settings hold for this visit.
  }
}

function originOf(text: string): string {
  try {
    return new URL(text).origin;
  } catch {
    return "";
  }
}
