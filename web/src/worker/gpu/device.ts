import { DeviceError, RequestError } from "../../both/errors.js";
import type { DeviceClass, Manifest, Program } from "../../both/manifest.js";
import type { ProgramChoice } from "../../both/messages.js";
import { type Adapter, classOf, lineUp } from "./variants.js";

/** A device that can run `program`. */
export interface OpenDevice {
  readonly device: GPUDevice;
  readonly program: Program;
  /** Why it is that program. */
  readonly choice: ProgramChoice;
  /** What the adapter calls itself, for people. */
  readonly adapterName: string;
}

const NO_WEBGPU =
  "WebGPU is missing. Use Chrome or Edge 113+, Safari 26+ or Firefox 141+, over https or on localhost, " +
  "with graphics acceleration on.";

/** These grow with the model and the cache, so the device gets as much as its adapter allows. */
const AT_MOST = ["maxBufferSize", "maxStorageBufferBindingSize"] as const;

/** Opens the device with the program of the manifest that suits it, or the one that is asked for by name. */
export async function openDevice(manifest: Manifest, pinned?: string): Promise<OpenDevice> {
  const gpu = (globalThis.navigator as Navigator | undefined)?.gpu;
  if (!gpu) throw new DeviceError(NO_WEBGPU);
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new DeviceError(`The browser offers no GPU adapter. ${NO_WEBGPU}`);

  const largestTensor = Math.max(...manifest.weights.tensors.map((tensor) => tensor.bytes));
  const deviceClass = classOf(describe(adapter.info));
  const able = withLanguage(adapter, gpu.wgslLanguageFeatures);
  const program = chooseProgram(manifest.programs, largestTensor, able, deviceClass, pinned);
  const requiredLimits: Record<string, number> = {};
  for (const name of program.requires.limits.keys())
    requiredLimits[name] = program.requires.limits.get(name) ?? 0;
  for (const name of AT_MOST) requiredLimits[name] = adapter.limits[name];
  // Features of the language are there without being asked for.
  const requiredFeatures = program.requires.features.filter((name) =>
    adapter.features.has(name),
  ) as GPUFeatureName[];
  const device = await adapter.requestDevice({ requiredFeatures, requiredLimits });
  const { description, vendor, architecture } = adapter.info;
  return {
    device,
    program,
    choice: { deviceClass, pinned: pinned !== undefined },
    adapterName: description || [vendor, architecture].filter(Boolean).join(" ") || "unknown",
  };
}

/** An adapter as classes of devices are told apart by. Browsers hide its kind, but tell a phone. */
export function describe(info: GPUAdapterInfo, userAgent: string = navigator.userAgent): Adapter {
  const { vendor, architecture, device, description, isFallbackAdapter } = info;
  const kind = isFallbackAdapter ? "cpu" : /Android|iPhone|iPad/.test(userAgent) ? "mobile" : "other";
  return { vendor, architecture, name: device, driver: description, kind };
}

/** What decides which program runs: an adapter's limits, its features and those of the language. */
export interface AdapterAbilities {
  readonly features: { has(name: string): boolean };
  readonly limits: object;
}

/** An adapter with the features of WGSL that the browser has (none are told before Chrome 115). */
export function withLanguage(
  adapter: AdapterAbilities,
  language: { has(name: string): boolean } | undefined,
): AdapterAbilities {
  const has = (name: string) => adapter.features.has(name) || (language?.has(name) ?? false);
  return { features: { has }, limits: adapter.limits };
}

/**
 * The program for a class of devices, of those that the adapter can run; else a DeviceError that names what
 * each of them lacks. `pinned`: only the program of this name.
 */
export function chooseProgram(
  programs: readonly Program[],
  largestTensor: number,
  adapter: AdapterAbilities,
  deviceClass: DeviceClass,
  pinned?: string,
): Program {
  const named = programs.filter(({ name }) => pinned === undefined || name === pinned);
  if (named.length === 0)
    throw new RequestError(
      `The artifact has the programs ${programs.map(({ name }) => name).join(", ")}, not ${pinned}.`,
      "program",
    );
  const reasons: string[] = [];
  const able: Program[] = [];
  for (const program of named) {
    const lacking = lacks(program, largestTensor, adapter);
    if (lacking.length === 0) able.push(program);
    else reasons.push(`${program.name}: ${lacking.join(", ")}`);
  }
  const [best] = lineUp(able, deviceClass);
  if (best) return best;
  throw new DeviceError(
    `This GPU cannot run the model (${reasons.join("; ")}). Try a smaller model, more quantization, or ` +
      "another browser or device.",
  );
}

function lacks(program: Program, largestTensor: number, { features, limits }: AdapterAbilities): string[] {
  const lacking = program.requires.features.filter((feature) => !features.has(feature));
  const needs = new Map(program.requires.limits);
  needs.set(
    "maxStorageBufferBindingSize",
    Math.max(needs.get("maxStorageBufferBindingSize") ?? 0, largestTensor),
  );
  for (const [name, need] of needs) {
    const has = limitOf(limits, name);
    if (has < need) lacking.push(`${name} must be ${need}, is ${has}`);
  }
  return lacking;
}

function limitOf(limits: object, name: string): number {
  const value: unknown = name in limits ? limits[name as keyof typeof limits] : undefined;
  return typeof value === "number" ? value : 0;
}
