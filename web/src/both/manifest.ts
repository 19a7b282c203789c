import { ArtifactError } from "./errors.js";
import { sha256Hex } from "./http.js";
import { type Field, parseJson, show } from "./json.js";

/** The manifest of an artifact, as docs/artifact.md lays it down (what a WebGPU runtime needs of it). */

export const FORMAT = "nearfar-artifact";
export const VERSION = 2;

/** Bytes of one element of each dtype that a buffer or tensor may have. */
export const DTYPE_BYTES = {
  float16: 2,
  float32: 4,
  int8: 1,
  int32: 4,
  uint8: 1,
  uint32: 4,
} as const;
export type Dtype = keyof typeof DTYPE_BYTES;
const DTYPES = Object.keys(DTYPE_BYTES) as Dtype[];

/** Sizes that the runtime chooses at load. */
export const SYMBOLS = ["pages", "context"] as const;
export type Dim = number | (typeof SYMBOLS)[number];

export const FUNCTIONS = ["step", "greedy", "sample", "logprobs"] as const;
export type FunctionName = (typeof FUNCTIONS)[number];

export interface ModelInfo {
  readonly name: string;
  readonly architecture: string;
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly vocabSize: number;
  readonly contextLength: number;
  readonly bosTokenId: number | null;
  readonly eosTokenIds: readonly number[];
}

export interface FileEntry {
  readonly file: string;
  readonly bytes: number;
  readonly sha256: string;
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

export interface FunctionEntry {
  readonly size: number;
  readonly rows: number;
  readonly plan: string;
  readonly sha256: string;
}

export interface Program {
  readonly precision: string;
  readonly kvDtype: Dtype;
  readonly requires: { readonly features: readonly string[]; readonly limits: ReadonlyMap<string, number> };
  readonly workspace: readonly number[];
  readonly kernels: ReadonlyMap<string, KernelEntry>;
  /** Ascending by size. */
  readonly functions: Readonly<Record<FunctionName, readonly FunctionEntry[]>>;
}

export interface Manifest {
  readonly model: ModelInfo;
  readonly cache: { readonly pageSize: number; readonly slots: number };
  readonly rope: { readonly invFreq: string; readonly scale: number };
  readonly weights: {
    readonly bytes: number;
    readonly shardBytes: number;
    readonly shards: readonly FileEntry[];
    readonly tensors: readonly TensorEntry[];
  };
  readonly buffers: readonly BufferEntry[];
  readonly programs: readonly Program[];
  readonly tokenizerFiles: readonly FileEntry[];
  readonly quantization: string;
  readonly license: string | null;
}

/** The manifest of an artifact as its build wrote it: `parseManifest`, and its own digest. */
export async function openManifest(text: string): Promise<Manifest> {
  const manifest = parseManifest(text);
  const stated = parseJson(text, "manifest.json").at("manifest_sha256").sha256();
  // The digest of the file with the digest's own digits replaced by zeros.
  const [before = "", after, ...more] = text.split(stated);
  const bytes = new TextEncoder().encode(`${before}${"0".repeat(64)}${after}`);
  if (more.length > 0 || (await sha256Hex(bytes)) !== stated)
    throw new ArtifactError(
      "manifest.json is not as the build wrote it: its manifest_sha256 is not that of its bytes. Upload the artifact again, or build it again.",
    );
  return manifest;
}

/** Parses and checks a manifest; throws ArtifactError with the path of the first wrong value. */
export function parseManifest(text: string): Manifest {
  const root = parseJson(text, "manifest.json");
  const format = root.at("format").value;
  if (format !== FORMAT)
    throw new ArtifactError(`manifest.json says format ${show(format)}: this is no nearfar artifact.`);
  const version = root.at("version").int(1);
  if (version > VERSION)
    throw new ArtifactError(
      `The artifact has format version ${version}, this runtime reads up to ${VERSION}. Upgrade the npm package nearfar.`,
    );
  if (version < VERSION)
    throw new ArtifactError(
      `The artifact has format version ${version}, this runtime reads ${VERSION}. Build it again with this version of nearfar.`,
    );
  const target = root.at("target").string();
  if (target !== "webgpu")
    throw new ArtifactError(`The artifact is built for ${target}. Build one with: nearfar build … --target webgpu`);

  const manifest: Manifest = {
    model: readModel(root.at("model")),
    cache: { pageSize: root.at("cache").at("page_size").int(1), slots: root.at("cache").at("slots").int(1) },
    rope: { invFreq: root.at("rope").at("inv_freq").string(), scale: root.at("rope").at("scale").number() },
    weights: readWeights(root.at("weights")),
    buffers: root.at("buffers").list(readBuffer),
    programs: root.at("programs").list(readProgram),
    tokenizerFiles: root.at("tokenizer").at("files").list(readFile),
    quantization: root.at("quantization").optional()?.at("scheme").optional()?.string() ?? "none",
    license: root.at("license").optional()?.string() ?? null,
  };
  if (manifest.programs.length === 0)
    throw new ArtifactError("manifest.json lists no programs. Build the artifact again.");
  checkModel(manifest.model);
  checkWeights(manifest);
  for (const program of manifest.programs) checkFunctions(program);
  return manifest;
}

function readModel(model: Field): ModelInfo {
  return {
    name: model.at("name").string(),
    architecture: model.at("architecture").string(),
    layers: model.at("layers").int(1),
    kvHeads: model.at("kv_heads").int(1),
    headDim: model.at("head_dim").int(1),
    vocabSize: model.at("vocab_size").int(1),
    contextLength: model.at("context_length").int(1),
    bosTokenId: model.at("bos_token_id").optional()?.int() ?? null,
    eosTokenIds: model.at("eos_token_ids").list((id) => id.int()),
  };
}

function readFile(entry: Field): FileEntry {
  return { file: entry.at("file").file(), bytes: entry.at("bytes").int(), sha256: entry.at("sha256").sha256() };
}

function readWeights(weights: Field): Manifest["weights"] {
  return {
    bytes: weights.at("bytes").int(),
    shardBytes: weights.at("shard_bytes").int(1),
    shards: weights.at("shards").list(readFile),
    tensors: weights.at("tensors").list((tensor) => ({
      name: tensor.at("name").string(),
      dtype: tensor.at("dtype").oneOf(DTYPES),
      shape: tensor.at("shape").list((dim) => dim.int()),
      offset: tensor.at("offset").int(),
      bytes: tensor.at("bytes").int(),
    })),
  };
}

function readDim(dim: Field): Dim {
  return typeof dim.value === "string" ? dim.oneOf(SYMBOLS) : dim.int();
}

function readBuffer(buffer: Field): BufferEntry {
  return {
    name: buffer.at("name").string(),
    dtype: buffer.at("dtype").oneOf([...DTYPES, "kv"]),
    shape: buffer.at("shape").list(readDim),
  };
}

function readProgram(program: Field): Program {
  const functions = program.at("functions");
  const sizes = (name: FunctionName): FunctionEntry[] =>
    (functions.at(name).optional()?.list(readFunction) ?? []).sort((a, b) => a.size - b.size);
  const requires = program.at("requires");
  return {
    precision: program.at("precision").string(),
    kvDtype: program.at("kv_dtype").oneOf(DTYPES),
    requires: {
      features: requires.at("features").list((feature) => feature.string()),
      limits: requires.at("limits").record((limit) => limit.int()),
    },
    workspace: program.at("workspace").list((bytes) => bytes.int()),
    kernels: program.at("kernels").record(readKernel),
    functions: { step: sizes("step"), greedy: sizes("greedy"), sample: sizes("sample"), logprobs: sizes("logprobs") },
  };
}

function readKernel(kernel: Field): KernelEntry {
  return {
    file: kernel.at("file").file(),
    entry: kernel.at("entry").string(),
    access: kernel.at("access").list((access) => access.oneOf(["read", "read_write"])),
    sha256: kernel.at("sha256").sha256(),
  };
}

function readFunction(entry: Field): FunctionEntry {
  return {
    size: entry.at("size").int(1),
    rows: entry.at("rows").int(1),
    plan: entry.at("plan").file(),
    sha256: entry.at("sha256").sha256(),
  };
}

function checkModel({ bosTokenId, eosTokenIds, vocabSize }: ModelInfo): void {
  for (const token of [...eosTokenIds, bosTokenId ?? 0])
    if (token >= vocabSize)
      throw new ArtifactError(`The special token ${token} is not below the vocabulary's size, ${vocabSize}.`);
}

/** Every step needs a bucket, and every bucket a size of its own with so many rows at most. */
function checkFunctions({ precision, functions }: Program): void {
  for (const name of FUNCTIONS) {
    const buckets = functions[name];
    if (buckets.length === 0 && (name === "step" || name === "greedy"))
      throw new ArtifactError(`The program ${precision} has no bucket of ${name}. Build the artifact again.`);
    buckets.forEach(({ size, rows }, i) => {
      if (size === buckets[i - 1]?.size || rows > size)
        throw new ArtifactError(`The program ${precision} lists ${name} of size ${size} twice, or with ${rows} rows.`);
    });
  }
}

/** The shards must hold exactly the stream that the tensors lie in. */
function checkWeights({ model, weights, rope }: Manifest): void {
  const { shards, shardBytes, bytes, tensors } = weights;
  shards.forEach((shard, i) => {
    const expected = Math.min(shardBytes, bytes - i * shardBytes);
    if (shard.bytes !== expected)
      throw new ArtifactError(
        `${shard.file} is listed with ${shard.bytes} bytes; its place in the stream is ${expected}.`,
      );
  });
  const held = shards.reduce((sum, shard) => sum + shard.bytes, 0);
  if (held !== bytes) throw new ArtifactError(`The weight shards hold ${held} bytes, manifest.json states ${bytes}.`);
  for (const tensor of tensors) {
    const end = tensor.offset + tensor.bytes;
    if (tensor.offset % 4 !== 0 || end > bytes)
      throw new ArtifactError(
        `The tensor ${tensor.name} [${tensor.offset}, ${end}) lies outside the ${bytes} bytes of weights.`,
      );
    const size = tensor.shape.reduce((product, dim) => product * dim, DTYPE_BYTES[tensor.dtype]);
    if (size !== tensor.bytes)
      throw new ArtifactError(`The tensor ${tensor.name} has ${tensor.bytes} bytes; its shape and dtype need ${size}.`);
  }
  const ordered = [...tensors].sort((a, b) => a.offset - b.offset || a.bytes - b.bytes);
  ordered.forEach((tensor, i) => {
    const last = ordered[i - 1];
    if (last && last.offset + last.bytes > tensor.offset)
      throw new ArtifactError(`The tensors ${last.name} and ${tensor.name} overlap.`);
  });
  if (new Set(tensors.map(({ name }) => name)).size < tensors.length)
    throw new ArtifactError("The weights name a tensor twice.");
  const frequencies = tensors.find((tensor) => tensor.name === rope.invFreq);
  if (!frequencies)
    throw new ArtifactError(`The weights lack the tensor ${rope.invFreq} that manifest.json names for rope.`);
  if (frequencies.dtype !== "float32" || frequencies.shape.join() !== `${model.headDim / 2}`)
    throw new ArtifactError(
      `The tensor ${rope.invFreq} is ${frequencies.dtype} [${frequencies.shape}]; rope needs float32 [${model.headDim / 2}].`,
    );
}
