import type { Manifest, Program } from "../../artifact/manifest.js";
import { DeviceError } from "../../protocol/errors.js";
import { type ProgramWish, wantedPrograms } from "../device/wanted.js";
import type { AdapterAbilities, Gpu } from "./adapter.js";
import { TIMESTAMPS } from "./timestamps.js";

/** Limits that grow with the model and the cache, so the device gets as much as its adapter allows. */
const AT_MOST = ["maxBufferSize", "maxStorageBufferBindingSize"] as const;

/** Opens a device that can run all of the programs. */
export async function openDevice({ adapter }: Gpu, programs: readonly Program[]): Promise<GPUDevice> {
  // Features of WGSL need no request.
  const named = programs.flatMap(({ requires }) => requires.features);
  const requiredFeatures = new Set([...named, TIMESTAMPS].filter((name) => adapter.features.has(name)));
  const requiredLimits: Record<string, number> = {};
  for (const { requires } of programs)
    for (const [name, value] of requires.limits)
      requiredLimits[name] = Math.max(value, requiredLimits[name] ?? 0);
  for (const name of AT_MOST) requiredLimits[name] = adapter.limits[name];
  try {
    return await adapter.requestDevice({
      requiredFeatures: [...requiredFeatures] as GPUFeatureName[],
      requiredLimits,
    });
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new DeviceError(
      `The GPU's adapter opens no device: ${reason}. Restart the browser, or update the graphics driver.`,
      { code: "device-unsuitable", cause },
    );
  }
}

/**
 * The programs that the adapter can run. Throws a DeviceError that names what each program lacks if there are
 * none. `wish` restricts the choice to programs with these properties.
 */
export function ablePrograms(
  { programs, weights }: Pick<Manifest, "programs" | "weights">,
  adapter: AdapterAbilities,
  wish: ProgramWish = {},
): readonly [Program, ...Program[]] {
  const named = wantedPrograms(programs, wish);
  const largestTensor = Math.max(...weights.tensors.map(({ bytes }) => bytes));
  const reasons: string[] = [];
  const able: Program[] = [];
  for (const program of named) {
    const lacking = lacks(program, largestTensor, adapter);
    if (lacking.length === 0) able.push(program);
    else reasons.push(`${program.name}: ${lacking.join(", ")}`);
  }
  const [best, ...others] = able;
  if (best) return [best, ...others];
  throw new DeviceError(
    `This GPU cannot run the model (${reasons.join("; ")}). Try a smaller model, more quantization, or ` +
      "another browser or device.",
    { code: "device-unsuitable" },
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
