import { ArtifactError } from "./errors.js";
import type { Field } from "./json.js";
import { parseJson } from "./json.js";
import type { KernelEntry } from "./manifest.js";

/** One argument of a launch: a whole buffer, named within its space. */
export interface PlanArg {
  readonly space: "weight" | "buffer" | "workspace";
  readonly name: string;
}

export interface Launch {
  readonly kernel: string;
  readonly grid: readonly [number, number, number];
  readonly args: readonly PlanArg[];
}

/** A straight line of kernel launches. */
export interface Plan {
  readonly launches: readonly Launch[];
}

const SPACES = ["weight", "buffer", "workspace"] as const;

export function parsePlan(text: string, file: string, kernels: ReadonlyMap<string, KernelEntry>): Plan {
  return {
    launches: parseJson(text, file)
      .at("launches")
      .list((launch) => readLaunch(launch, kernels)),
  };
}

function readLaunch(launch: Field, kernels: ReadonlyMap<string, KernelEntry>): Launch {
  const kernel = launch.at("kernel").string();
  const [x = 1, y = 1, z = 1] = launch.at("grid").list((extent) => extent.int(1));
  const args = launch.at("args").list(readArg);
  const entry = kernels.get(kernel);
  if (!entry) throw new ArtifactError(`${launch.path} names the kernel ${kernel}, which manifest.json does not list.`);
  if (entry.access.length !== args.length)
    throw new ArtifactError(
      `${launch.path} gives ${kernel} ${args.length} arguments; it takes ${entry.access.length}.`,
    );
  return { kernel, grid: [x, y, z], args };
}

function readArg(arg: Field): PlanArg {
  const text = arg.string();
  const colon = text.indexOf(":");
  const space = SPACES.find((name) => name === text.slice(0, colon));
  if (!space) throw new ArtifactError(`${arg.path} is "${text}"; known spaces are ${SPACES.join(", ")}.`);
  return { space, name: text.slice(colon + 1) };
}
