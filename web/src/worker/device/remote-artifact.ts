import type { FunctionName, KernelEntry, Manifest, Program } from "../../artifact/manifest.js";
import { FUNCTIONS } from "../../format/constants.js";
import type { KeptOptions } from "../store/kept-file.js";
import { openFiles, type ReadFile } from "../store/packs.js";
import { type Plan, parsePlan, planNames } from "./plan.js";

/** A kernel's source, with what the manifest says about it. */
export interface Shader extends Pick<KernelEntry, "entry" | "access"> {
  readonly code: string;
}

/** The plans of each function by size, ascending. */
export type Plans = Record<FunctionName, Map<number, Plan>>;

/** An artifact's files, stored here or on their server, each checked by its SHA-256. */
export class RemoteArtifact {
  constructor(
    readonly base: URL,
    readonly manifest: Manifest,
    private readonly options: Pick<KeptOptions, "fetch" | "cache">,
  ) {}

  async open(program: Program, signal: AbortSignal): Promise<ProgramFiles> {
    const read = await openFiles(this.base, this.manifest, program.name, { ...this.options, signal });
    return new ProgramFiles(this.manifest, program, read);
  }
}

/** The kernels and plans of a program. */
export class ProgramFiles {
  constructor(
    private readonly manifest: Manifest,
    readonly program: Program,
    readonly read: ReadFile,
  ) {}

  /** The kernels by name. */
  async shaders(): Promise<Map<string, Shader>> {
    const read = async ([name, kernel]: [string, KernelEntry]): Promise<[string, Shader]> => {
      const { entry, access } = kernel;
      return [name, { code: new TextDecoder().decode(await this.read(kernel)), entry, access }];
    };
    return new Map(await Promise.all([...this.program.kernels].map(read)));
  }

  async plans(): Promise<Plans> {
    const names = planNames(this.manifest, this.program);
    const read = async (name: FunctionName): Promise<[FunctionName, Map<number, Plan>]> => {
      const entries = this.program.functions[name].map(async (bucket) => {
        const bytes = await this.read({ file: bucket.plan, sha256: bucket.sha256 });
        const plan = parsePlan(new TextDecoder().decode(bytes), name, bucket, names);
        return [bucket.size, plan] as const;
      });
      return [name, new Map(await Promise.all(entries))];
    };
    return Object.fromEntries(await Promise.all(FUNCTIONS.map(read))) as Plans;
  }
}
