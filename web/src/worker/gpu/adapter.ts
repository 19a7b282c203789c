import { type DEVICE_CLASSES, RULES } from "../../format/constants.js";
import type { DeviceClass } from "../../protocol/backends.js";
import { DeviceError } from "../../protocol/errors.js";

/**
 * Finds the GPU and its class, which is all that the choice of a backend needs. format/adapters.py defines
 * the same classes; tests/vectors/variants tests both.
 */

/** A GPU of this machine that is not opened yet. */
export interface Gpu {
  readonly adapter: GPUAdapter;
  readonly abilities: AdapterAbilities;
  readonly described: Adapter;
  readonly deviceClass: DeviceClass;
  /** The adapter's name for messages. */
  readonly name: string;
}

const NO_WEBGPU =
  "WebGPU is missing. Use Chrome or Edge 113+, Safari 26+, or Firefox 141+ on Windows or 145+ on a Mac, over https " +
  "or on localhost.";
const NO_ADAPTER =
  "The browser has WebGPU, but offers no GPU for it. Turn graphics acceleration on in the browser's settings, " +
  "update the graphics driver, or restart the browser if this worked before.";

/** Facts that an adapter reports; empty if it reports none. */
export interface Adapter {
  readonly vendor: string;
  readonly architecture: string;
  readonly name: string;
  readonly driver: string;
  /** The driver's kind of the device, or "mobile" for a phone's or tablet's; "other" where unknown. */
  readonly kind: string;
}

interface Rule {
  readonly deviceClass: (typeof DEVICE_CLASSES)[number];
  readonly kinds: readonly string[];
  readonly vendors: readonly string[];
  readonly words: readonly string[];
}

/**
 * Finds the adapter on which to open a device. An adapter opens only one device, so each device needs a new
 * adapter.
 */
export async function findGpu(): Promise<Gpu> {
  const gpu = (globalThis.navigator as Navigator | undefined)?.gpu;
  if (!gpu) throw new DeviceError(NO_WEBGPU, { code: "webgpu-missing" });
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new DeviceError(NO_ADAPTER, { code: "no-adapter" });
  const described = describe(adapter.info);
  const { description, vendor, architecture } = adapter.info;
  const name = description || [vendor, architecture].filter(Boolean).join(" ") || "unknown";
  const abilities = withLanguage(adapter, gpu.wgslLanguageFeatures);
  return { adapter, abilities, described, deviceClass: classOf(described), name };
}

/**
 * The facts by which device classes are told apart. Browsers hide the adapter's kind, but `userAgent` shows a
 * phone.
 */
export function describe(info: GPUAdapterInfo, userAgent: string = navigator.userAgent): Adapter {
  const { vendor, architecture, device, description, isFallbackAdapter } = info;
  const kind = isFallbackAdapter ? "cpu" : /Android|iPhone|iPad/.test(userAgent) ? "mobile" : "other";
  return { vendor, architecture, name: device, driver: description, kind };
}

/**
 * The facts that decide which programs can run: the adapter's limits, its features and the features of WGSL.
 */
export interface AdapterAbilities {
  readonly features: { has(name: string): boolean };
  readonly limits: object;
}

/** Adds the browser's features of WGSL to an adapter (browsers before Chrome 115 report none). */
export function withLanguage(
  adapter: AdapterAbilities,
  language: { has(name: string): boolean } | undefined,
): AdapterAbilities {
  const has = (name: string) => adapter.features.has(name) || (language?.has(name) ?? false);
  return { features: { has }, limits: adapter.limits };
}

/** The class of an adapter: the class of the first rule that fits it. */
export function classOf(adapter: Adapter): DeviceClass {
  const { vendor, architecture, name, driver, kind } = adapter;
  const said = [vendor, architecture, name, driver].join(" ").toLowerCase();
  const rules: readonly Rule[] = RULES;
  const met = rules.find(
    ({ kinds, vendors, words }) =>
      (kinds.length === 0 || kinds.includes(kind)) &&
      (vendors.length === 0 || vendors.includes(vendor.toLowerCase())) &&
      (words.length === 0 || words.some((word) => said.includes(word))),
  );
  return met?.deviceClass ?? "integrated";
}
