import type * as format from "../format/constants.js";
import type { BackendName, DeviceClass } from "../protocol/backends.js";

/** The manifest of an artifact as docs/artifact.md defines it (the parts that a browser's runtime needs). */

export type Dtype = keyof typeof format.DTYPE_BYTES;
/** The dtypes in which activations and the cache may be stored. */
export const FLOATS = ["float16", "float32"] as const;
export const KV_DTYPES = [...FLOATS, "int8", "int4"] as const;

/**
 * An extent: a number, or a word for a number that the runtime chooses at load, which is the pages of a group
 * or the context length.
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
  /** Whether a step ends in logits ("generate") or in embeddings ("embed"). */
  readonly task: "generate" | "embed";
}

/**
 * Caches whose layers look equally far back: over as many positions as the window, or, for null, over all.
 */
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
  /** The name of the tensor with the frequencies. */
  readonly invFreq: string;
  readonly scale: number;
  /** For LongRoPE, the tensor of engines whose context is at most `context`. */
  readonly short: { readonly invFreq: string; readonly context: number } | null;
}

/** The name of the tensor with the frequencies for an engine with a context of `context` tokens. */
export function frequenciesOf({ invFreq, short }: RopeInfo, context: number): string {
  return short && context <= short.context ? short.invFreq : invFreq;
}

/** The names of all tensors with frequencies. */
export function allFrequencies({ invFreq, short }: RopeInfo): readonly string[] {
  return short ? [invFreq, short.invFreq] : [invFreq];
}

export interface FileEntry {
  readonly file: string;
  readonly bytes: number;
  readonly sha256: string;
}

/** A bundle file: several small files of a program in one, or, with `program` null, of the tokenizer. */
export interface BundleFile extends FileEntry {
  readonly program: string | null;
}

export interface TensorEntry {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  /** The offset in the stream of all shards. */
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

/** An argument of a kernel in a library. */
export interface KernelParam {
  readonly dtype: Dtype;
  readonly shape: readonly Dim[];
}

/** A library file; the manifest does not state its size. */
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
  /** The shaders (webgpu). */
  readonly kernels: ReadonlyMap<string, KernelEntry>;
  /** The functions of the library with their arguments (wasm). */
  readonly routines: ReadonlyMap<string, readonly KernelParam[]>;
  readonly library: LibraryEntry | null;
  /** For each function, its sizes in ascending order. */
  readonly functions: Readonly<Record<FunctionName, readonly FunctionEntry[]>>;
  /** The device class for which its kernels were made; null if the build did not state it. */
  readonly deviceClass: DeviceClass | null;
}

export interface Manifest {
  readonly target: BackendName;
  readonly model: ModelInfo;
  readonly cache: { readonly pageSize: number; readonly slots: number };
  readonly groups: readonly GroupInfo[];
  readonly caches: readonly CacheInfo[];
  /** The rotations, by name. */
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
  readonly packs: readonly BundleFile[];
  readonly quantization: string;
  readonly checkpoint: string | null;
  readonly license: string | null;
  /**
   * How the model marks the parts of its answers; checked where it is used. Null if the build did not state
   * it.
   */
  readonly answers: format.AnswerFormatRecord | null;
  /**
   * The model's own sampling parameters, for requests that give none; checked like the options of a request.
   */
  readonly sampling: format.SamplingDefaultsRecord;
}

/** A manifest with its own digest, which covers the digests of all files and so identifies the build. */
export interface SealedManifest extends Manifest {
  readonly digest: string;
}

/** The precision of a program, as messages name it. */
export function precisionOf({ activations }: Program): "f16" | "f32" {
  return activations === "float16" ? "f16" : "f32";
}

/** The SHA-256 digests of the files that a load may request; files in bundle files come with these. */
export function filesOf({ weights, tokenizerFiles, programs, packs }: Manifest): string[] {
  const entries: { readonly sha256: string }[] = [...weights.shards, ...packs];
  const bundled = new Set(packs.map(({ program }) => program));
  if (!bundled.has(null)) entries.push(...tokenizerFiles);
  for (const { name, kernels, library, functions } of programs)
    if (!bundled.has(name))
      entries.push(...kernels.values(), ...Object.values(functions).flat(), ...(library ? [library] : []));
  return [...new Set(entries.map(({ sha256 }) => sha256))];
}
