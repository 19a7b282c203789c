import { DeviceError } from "../../both/errors.js";
import type { Manifest, Program } from "../../both/manifest.js";

/** A device that can run `program`. */
export interface OpenDevice {
  readonly device: GPUDevice;
  readonly program: Program;
  /** What the adapter calls itself, for people. */
  readonly adapterName: string;
}

const NO_WEBGPU =
  "WebGPU is missing. Use Chrome or Edge 113+, Safari 26+ or Firefox 141+, over https or on localhost, " +
  "with graphics acceleration on.";

/** These grow with the model and the cache, so the device gets as much as its adapter allows. */
const AT_MOST = ["maxBufferSize", "maxStorageBufferBindingSize"] as const;

/** Opens the device with the first program of the manifest that it can run. */
export async function openDevice(manifest: Manifest): Promise<OpenDevice> {
  const gpu = (globalThis.navigator as Navigator | undefined)?.gpu;
  if (!gpu) throw new DeviceError(NO_WEBGPU);
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new DeviceError(`The browser offers no GPU adapter. ${NO_WEBGPU}`);

  const largestTensor = Math.max(...manifest.weights.tensors.map((tensor) => tensor.bytes));
  const program = chooseProgram(manifest.programs, largestTensor, adapter);
  const requiredLimits: Record<string, number> = {};
  for (const name of program.requires.limits.keys())
    requiredLimits[name] = program.requires.limits.get(name) ?? 0;
  for (const name of AT_MOST) requiredLimits[name] = adapter.limits[name];
  const requiredFeatures = program.requires.features as GPUFeatureName[];
  const device = await adapter.requestDevice({ requiredFeatures, requiredLimits });
  const { description, vendor, architecture } = adapter.info;
  return {
    device,
    program,
    adapterName: description || [vendor, architecture].filter(Boolean).join(" ") || "unknown",
  };
}

/** What of an adapter decides which program it runs. */
export interface AdapterAbilities {
  readonly features: { has(name: string): boolean };
  readonly limits: object;
}

/** The first program that the adapter can run; else a DeviceError that names what each of them lacks. */
export function chooseProgram(
  programs: readonly Program[],
  largestTensor: number,
  adapter: AdapterAbilities,
): Program {
  const reasons: string[] = [];
  for (const program of programs) {
    const lacking = lacks(program, largestTensor, adapter);
    if (lacking.length === 0) return program;
    reasons.push(`${program.name}: ${lacking.join(", ")}`);
  }
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
