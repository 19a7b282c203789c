import type * as format from "../format/constants.js";
import type { BackendName, DeviceClass } from "../protocol/backends.js";

/** The manifest of an artifact, as docs/artifact.md lays it down (what a browser's runtime needs of it). */

export type Dtype = keyof typeof format.DTYPE_BYTES;
/** What activations and the cache may be stored in. */
export const FLOATS = ["float16", "float32"] as const;
export const KV_DTYPES = [...FLOATS, "int8", "int4"] as const;

/**
 * An extent: a number, or what the runtime chooses at load: the pages of a group, the positions it has room
 * for.
 */
export type Dim = number | "context" | `pages.${number}`;

export type FunctionName = (typeof format.FUNCTIONS)[number];

export interface ModelInfo {
  readonly name: string;
  readonly architecture: string;
  readonly vocabSize: number;
  readonly contextLength: number;
  readonly bosTokenId: number | null;
  readonly eosTokenIds: readonly number[];
  /** Whether a step ends in logits or in embeddings. */
  readonly task: "generate" | "embed";
}

/** Caches whose layers look equally far back: to so many positions, or null: to all. */
export interface GroupInfo {
  readonly window: number | null;
  /** Positions of a column of states; null: a column is a page of positions. */
  readonly stride: number | null;
}

/** What one layer keeps: keys and values, one tensor, or a state of `depth` rows a head. */
export interface CacheInfo {
  readonly parts: "kv" | "k" | "state";
  readonly depth: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly group: number;
}

export interface RopeInfo {
  /** The tensor of the frequencies. */
  readonly invFreq: string;
  readonly scale: number;
  /** LongRoPE: the tensor that engines take whose context is at most `context`. */
  readonly short: { readonly invFreq: string; readonly context: number } | null;
}

/** The tensor of the frequencies of an engine with a context of so many tokens. */
export function frequenciesOf({ invFreq, short }: RopeInfo, context: number): string {
  return short && context <= short.context ? short.invFreq : invFreq;
}

/** The tensors of the frequencies of all engines. */
export function allFrequencies({ invFreq, short }: RopeInfo): readonly string[] {
  return short ? [invFreq, short.invFreq] : [invFreq];
}

export interface FileEntry {
  readonly file: string;
  readonly bytes: number;
  readonly sha256: string;
}

/** Small files in one: of a program, or, for null, of the tokenizer. */
export interface PackEntry extends FileEntry {
  readonly program: string | null;
}

export interface TensorEntry {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  /** In the stream of all shards. */
  readonly offset: number;
  readonly bytes: number;
}

export interface BufferEntry {
  readonly name: string;
  readonly dtype: Dtype | "kv";
  readonly shape: readonly Dim[];
}

export interface KernelEntry {
  readonly file: string;
  readonly entry: string;
  readonly access: readonly ("read" | "read_write")[];
  readonly sha256: string;
}

/** What a kernel of a library takes as an argument. */
export interface Param {
  readonly dtype: Dtype;
  readonly shape: readonly Dim[];
}

/** A file without a stated size. */
export type LibraryEntry = Omit<FileEntry, "bytes">;

export interface FunctionEntry {
  readonly size: number;
  readonly rows: number;
  readonly plan: string;
  readonly sha256: string;
}

export interface Program {
  readonly name: string;
  readonly activations: (typeof FLOATS)[number];
  readonly kvDtype: (typeof KV_DTYPES)[number];
  readonly requires: { readonly features: readonly string[]; readonly limits: ReadonlyMap<string, number> };
  readonly workspace: readonly number[];
  /** Shaders (webgpu). */
  readonly kernels: ReadonlyMap<string, KernelEntry>;
  /** The functions of the library, with what each takes (wasm). */
  readonly routines: ReadonlyMap<string, readonly Param[]>;
  readonly library: LibraryEntry | null;
  /** Ascending by size. */
  readonly functions: Readonly<Record<FunctionName, readonly FunctionEntry[]>>;
  /** The kind of GPU that its kernels are shaped for; null where the build did not say. */
  readonly deviceClass: DeviceClass | null;
}

export interface Manifest {
  readonly target: BackendName;
  readonly model: ModelInfo;
  readonly cache: { readonly pageSize: number; readonly slots: number };
  readonly groups: readonly GroupInfo[];
  readonly caches: readonly CacheInfo[];
  /** By name. */
  readonly ropes: ReadonlyMap<string, RopeInfo>;
  readonly weights: {
    readonly bytes: number;
    readonly shardBytes: number;
    readonly shards: readonly FileEntry[];
    readonly tensors: readonly TensorEntry[];
  };
  readonly buffers: readonly BufferEntry[];
  readonly programs: readonly Program[];
  readonly tokenizerFiles: readonly FileEntry[];
  readonly packs: readonly PackEntry[];
  readonly quantization: string;
  readonly license: string | null;
  /** How the model marks the parts of its answers, read where it is used; null where the build did not say. */
  readonly answers: format.AnswerFormatRecord | null;
  /** How the model wants its tokens drawn, checked like a request's own options: for requests that do not say. */
  readonly sampling: format.SamplingDefaultsRecord;
}

/** A manifest as its build wrote it: its digest, which covers all files, tells it from all others. */
export interface SealedManifest extends Manifest {
  readonly digest: string;
}

/** What a program computes in, as people name it. */
export function precisionOf({ activations }: Program): "f16" | "f32" {
  return activations === "float16" ? "f16" : "f32";
}

/**
 * The files that a manifest vouches for and that a load may ask for, by SHA-256: what lies in packs comes with
 * them.
 */
export function filesOf({ weights, tokenizerFiles, programs, packs }: Manifest): string[] {
  const entries: { readonly sha256: string }[] = [...weights.shards, ...packs];
  const packed = new Set(packs.map(({ program }) => program));
  if (!packed.has(null)) entries.push(...tokenizerFiles);
  for (const { name, kernels, library, functions } of programs)
    if (!packed.has(name))
      entries.push(...kernels.values(), ...Object.values(functions).flat(), ...(library ? [library] : []));
  return [...new Set(entries.map(({ sha256 }) => sha256))];
}
