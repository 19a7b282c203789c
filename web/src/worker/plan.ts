import { ArtifactError } from "../both/errors.js";
import type { LaunchRecord, PlanRecord } from "../both/format.js";
import type { Field } from "../both/json.js";
import { parseJson } from "../both/json.js";
import type { FunctionEntry, FunctionName, Manifest, Program } from "../both/manifest.js";

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

/** What the launches of a program can name. */
export interface PlanNames {
  readonly kernels: Program["kernels"];
  /** "space:name". */
  readonly args: ReadonlySet<string>;
}

export function planNames({ weights, buffers }: Manifest, { kernels, workspace }: Program): PlanNames {
  const args = [
    ...weights.tensors.map(({ name }) => `weight:${name}`),
    ...buffers.map(({ name }) => `buffer:${name}`),
    ...workspace.map((_, i) => `workspace:${i}`),
  ];
  return { kernels, args: new Set(args) };
}

/**
 * The plan of one bucket of the function `name`; throws ArtifactError where it is not that, or launches what
 * there is not.
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

function readLaunch(launch: Field<LaunchRecord>, { kernels, args: known }: PlanNames): Launch {
  const kernel = launch.at("kernel").string();
  const [x, y, z, ...more] = launch.at("grid").list((extent) => extent.int(1));
  const args = launch.at("args").list((arg) => readArg(arg, known));
  const entry = kernels.get(kernel);
  if (!entry)
    throw new ArtifactError(`${launch.path} names the kernel ${kernel}, which manifest.json does not list.`);
  if (entry.access.length !== args.length)
    throw new ArtifactError(
      `${launch.path} gives ${kernel} ${args.length} arguments; it takes ${entry.access.length}.`,
    );
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
