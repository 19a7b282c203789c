import { FUNCTIONS } from "../../both/format.js";
import type { FunctionName, KernelEntry, Manifest, Program } from "../../both/manifest.js";
import { type Plan, parsePlan, planNames } from "../plan.js";
import { type KeptOptions, keptText } from "../store/kept-file.js";
import type { Shader } from "./pipelines.js";

/** By function, then by size, ascending. */
export type Plans = Record<FunctionName, Map<number, Plan>>;

/** An artifact's files, kept here or on their server, each checked by its SHA-256. */
export class RemoteArtifact {
  constructor(
    readonly base: URL,
    readonly manifest: Manifest,
    private readonly options: Pick<KeptOptions, "fetch" | "cache">,
  ) {}

  /** A program's kernels by name. */
  async shaders({ kernels }: Program, signal: AbortSignal): Promise<Map<string, Shader>> {
    const read = async ([name, { file, sha256, entry, access }]: [string, KernelEntry]): Promise<
      [string, Shader]
    > => {
      return [name, { code: await this.#text(file, sha256, signal), entry, access }];
    };
    return new Map(await Promise.all([...kernels].map(read)));
  }

  async plans(program: Program, signal: AbortSignal): Promise<Plans> {
    const names = planNames(this.manifest, program);
    const read = async (name: FunctionName): Promise<[FunctionName, Map<number, Plan>]> => {
      const entries = program.functions[name].map(async (bucket) => {
        const text = await this.#text(bucket.plan, bucket.sha256, signal);
        return [bucket.size, parsePlan(text, name, bucket, names)] as const;
      });
      return [name, new Map(await Promise.all(entries))];
    };
    return Object.fromEntries(await Promise.all(FUNCTIONS.map(read))) as Plans;
  }

  #text(file: string, sha256: string, signal: AbortSignal): Promise<string> {
    return keptText(this.base, { file, sha256 }, { ...this.options, signal });
  }
}
