import type { Field } from "../../artifact/json.js";
import { parseJson } from "../../artifact/json.js";
import type { FunctionEntry, FunctionName, Manifest, Program } from "../../artifact/manifest.js";
import type { LaunchRecord, PlanRecord } from "../../format/constants.js";
import { ArtifactError } from "../../protocol/errors.js";

/** An argument of a launch: a whole buffer, by its name within its space. */
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

/** The grid of a kernel that divides its work itself. */
const ONE = [1, 1, 1] as const;

const SPACES = ["weight", "buffer", "workspace"] as const;

/** The names that the launches of a program can use. */
export interface PlanNames {
  /** The number of arguments of each kernel. */
  readonly kernels: ReadonlyMap<string, number>;
  /** Whether launches have a grid. */
  readonly grids: boolean;
  /** The arguments as "space:name". */
  readonly args: ReadonlySet<string>;
}

export function planNames({ target, weights, buffers }: Manifest, program: Program): PlanNames {
  const { kernels, routines, workspace } = program;
  const args = [
    ...weights.tensors.map(({ name }) => `weight:${name}`),
    ...buffers.map(({ name }) => `buffer:${name}`),
    ...workspace.map((_, i) => `workspace:${i}`),
  ];
  const counts = [
    ...[...kernels].map(([name, { access }]) => [name, access.length] as const),
    ...[...routines].map(([name, params]) => [name, params.length] as const),
  ];
  return { kernels: new Map(counts), grids: target === "webgpu", args: new Set(args) };
}

/**
 * Parses the plan of one bucket of the function `name`. Throws ArtifactError if the text is another plan, or
 * launches an unknown kernel.
 */
export function parsePlan(text: string, name: FunctionName, bucket: FunctionEntry, names: PlanNames): Plan {
  const root = parseJson<PlanRecord>(text, bucket.plan);
  const stated = `${root.at("function").string()} ${root.at("size").int()} ${root.at("rows").int()}`;
  const expected = `${name} ${bucket.size} ${bucket.rows}`;
  if (stated !== expected)
    throw new ArtifactError(
      `${bucket.plan} is the plan of ${stated}, not of ${expected}. Upload the artifact again.`,
    );
  return { launches: root.at("launches").list((launch) => readLaunch(launch, names)) };
}

function readLaunch(launch: Field<LaunchRecord>, { kernels, grids, args: known }: PlanNames): Launch {
  const kernel = launch.at("kernel").string();
  const [x, y, z, ...more] = grids ? launch.at("grid").list((extent) => extent.int(1)) : ONE;
  const args = launch.at("args").list((arg) => readArg(arg, known));
  const count = kernels.get(kernel);
  if (count === undefined)
    throw new ArtifactError(`${launch.path} names the kernel ${kernel}, which manifest.json does not list.`);
  if (count !== args.length)
    throw new ArtifactError(`${launch.path} gives ${kernel} ${args.length} arguments; it takes ${count}.`);
  if (x === undefined || y === undefined || z === undefined || more.length > 0)
    throw new ArtifactError(`${launch.path} gives ${kernel} a grid that has not three extents.`);
  return { kernel, grid: [x, y, z], args };
}

function readArg(arg: Field<string>, known: ReadonlySet<string>): PlanArg {
  const text = arg.string();
  const colon = text.indexOf(":");
  const space = SPACES.find((name) => name === text.slice(0, colon));
  if (!space) throw new ArtifactError(`${arg.path} is "${text}"; known spaces are ${SPACES.join(", ")}.`);
  if (!known.has(text))
    throw new ArtifactError(`${arg.path} is "${text}", which manifest.json does not list.`);
  return { space, name: text.slice(colon + 1) };
}
