/** The form for the cloud, and the part of it that the browser stores. */

import { MODES, type Mode } from "../src/routing/types.js";
import { element } from "./dom.js";

export interface CloudSettings {
  readonly mode: Mode;
  /** The server's address; empty where there is none. */
  readonly address: string;
  readonly key: string;
}

/** `preset`: the address that `nearfar web --cloud` named when this was stored. */
interface Kept extends Omit<CloudSettings, "key"> {
  readonly preset: string | null;
}

const STORAGE = "nearfar.cloud";
/**
 * The key stays in this tab unless a person chooses otherwise: an address like localhost:8080 may belong to
 * another server later, whose pages could read what is stored.
 */
const KEY_STORAGE = "nearfar.cloud-key";
const mode = element("mode", HTMLSelectElement);
const address = element("cloud-address", HTMLInputElement);
const key = element("cloud-key", HTMLInputElement);
const keepKey = element("keep-key", HTMLInputElement);
let preset: string | null = null;

/** Fills the form with stored values, and reports every change. */
export async function openCloudSettings(onChange: (settings: CloudSettings) => void): Promise<void> {
  preset = await readPreset();
  const kept = read();
  mode.value = kept.mode;
  address.value = kept.address;
  key.value = readKey(kept.address);
  // A key is for one server and is not sent to another one.
  let keysOwner = originOf(kept.address);
  address.addEventListener("change", () => {
    if (originOf(address.value.trim()) !== keysOwner) key.value = "";
  });
  key.addEventListener("change", () => {
    keysOwner = originOf(address.value.trim());
  });
  const changed = (): void => {
    const settings = settingsNow();
    keep(settings);
    show(settings);
    onChange(settings);
  };
  for (const field of [mode, address, key, keepKey]) field.addEventListener("change", changed);
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
  // Without a cloud there is nothing to choose.
  element("mode", HTMLSelectElement).hidden = address === "";
  element("cloud-title", HTMLHeadingElement).textContent =
    address === "" ? "Answers come from this device" : "Answers come from";
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
  const fresh: Kept = { mode: "auto", address: preset ?? "", preset };
  try {
    const { key, ...old } = JSON.parse(localStorage.getItem(STORAGE) ?? "{}") as Partial<Kept> & {
      key?: unknown;
    };
    // Earlier versions of this page left the key here.
    if (key !== undefined) localStorage.setItem(STORAGE, JSON.stringify(old));
    const kept = { ...fresh, ...old };
    // Another --cloud was given than last time: what was typed for the old one does not apply to it.
    return preset !== null && kept.preset !== preset ? { ...fresh, mode: kept.mode } : kept;
  } catch {
    return fresh;
  }
}

/** The key for this server: typed in this tab, or kept on this device. */
function readKey(address: string): string {
  try {
    const text = sessionStorage.getItem(KEY_STORAGE) ?? localStorage.getItem(KEY_STORAGE);
    keepKey.checked = localStorage.getItem(KEY_STORAGE) !== null;
    const { origin, key } = JSON.parse(text ?? "{}") as {
      origin?: string;
      key?: string;
    };
    return key !== undefined && origin === originOf(address) ? key : "";
  } catch {
    return "";
  }
}

function keep({ mode, address, key }: CloudSettings): void {
  try {
    localStorage.setItem(STORAGE, JSON.stringify({ mode, address, preset } satisfies Kept));
    sessionStorage.setItem(KEY_STORAGE, JSON.stringify({ origin: originOf(address), key }));
    if (keepKey.checked && key !== "")
      localStorage.setItem(KEY_STORAGE, JSON.stringify({ origin: originOf(address), key }));
    else localStorage.removeItem(KEY_STORAGE);
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
