/** Reads manifest.json and checks that it is unchanged since its build. */

import * as format from "../format/constants.js";
import { BACKENDS, type BackendName } from "../protocol/backends.js";
import { ArtifactError } from "../protocol/errors.js";
import { sha256Hex } from "../storage/http.js";
import { checkManifest } from "./consistency.js";
import { type Field, parseJson, show } from "./json.js";
import {
  type BufferEntry,
  type BundleFile,
  type CacheInfo,
  type Dim,
  type Dtype,
  type FileEntry,
  FLOATS,
  type FunctionEntry,
  type FunctionName,
  type KernelEntry,
  type KernelParam,
  KV_DTYPES,
  type LibraryEntry,
  type Manifest,
  type ModelInfo,
  type Program,
  type RopeInfo,
  type SealedManifest,
} from "./manifest.js";

const DTYPES = Object.keys(format.DTYPE_BYTES) as Dtype[];

/** Parses a manifest with `parseManifest` and checks its own digest. */
export async function openManifest(text: string): Promise<SealedManifest> {
  const manifest = parseManifest(text);
  const stated = parseJson<Record<typeof format.DIGEST, string>>(text, "manifest.json")
    .at(format.DIGEST)
    .sha256();
  // The digest is computed over the file with its own digits replaced by zeros.
  const [before = "", after, ...more] = text.split(stated);
  const bytes = new TextEncoder().encode(`${before}${"0".repeat(64)}${after}`);
  if (more.length > 0 || (await sha256Hex(bytes)) !== stated)
    throw new ArtifactError(
      `manifest.json is not as the build wrote it: its ${format.DIGEST} is not that of its bytes. ` +
        "Upload the artifact again, or build it again.",
    );
  return { ...manifest, digest: stated };
}

/** Parses and checks a manifest; throws ArtifactError with the path of the first wrong value. */
export function parseManifest(text: string): Manifest {
  const root = parseJson<format.ManifestRecord>(text, "manifest.json");
  const target = checkFormat(root);
  const cache = root.at("cache");
  const answers = root.at("answers").optional();
  const model = readModel(root.at("model"));
  const manifest: Manifest = {
    target,
    model,
    cache: { pageSize: cache.at("page_size").int(1), slots: cache.at("slots").int(1) },
    groups: root.at("groups").list((group) => ({
      window: group.at("window").optional()?.int(1) ?? null,
      stride: group.at("stride").optional()?.int(1) ?? null,
    })),
    caches: root.at("caches").list(readCache),
    ropes: root.at("ropes").record(readRope),
    weights: readWeights(root.at("weights")),
    buffers: root.at("buffers").list(readBuffer),
    programs: root.at("programs").list((program) => readProgram(program, target, model.task)),
    tokenizerFiles: root.at("tokenizer").at("files").list(readFile),
    packs: root.at("packs").optional()?.list(readBundleFile) ?? [],
    quantization: root.at("quantization").at("scheme").string(),
    checkpoint: root.at("provenance").optional()?.at("checkpoint_sha256").optional()?.string() ?? null,
    license: root.at("license").optional()?.string() ?? null,
    answers: (answers?.value ?? null) as format.AnswerFormatRecord | null,
    sampling: Object.fromEntries(
      root
        .at("sampling")
        .optional()
        ?.record((value) => value.number()) ?? [],
    ),
  };
  checkManifest(manifest);
  return manifest;
}

function checkFormat(root: Field<format.ManifestRecord>): BackendName {
  const named = root.at("format").value;
  if (named !== format.FORMAT)
    throw new ArtifactError(`manifest.json says format ${show(named)}: this is not an artifact of nearfar.`, {
      code: "not-an-artifact",
    });
  const version = root.at("version").int(1);
  if (version > format.VERSION)
    throw new ArtifactError(
      `The artifact has format version ${version}, this runtime reads up to ${format.VERSION}. ` +
        "Upgrade the npm package nearfar.",
      { code: "artifact-unsuitable" },
    );
  if (version < format.OLDEST)
    throw new ArtifactError(
      `The artifact has format version ${version}, this runtime reads from ${format.OLDEST} on. ` +
        "Build it again with this version of nearfar.",
      { code: "artifact-unsuitable" },
    );
  const target = root.at("target").string();
  const backend = BACKENDS.find((name) => name === target);
  if (!backend)
    throw new ArtifactError(
      `The artifact is built for ${target}. Build one with: nearfar build … --target webgpu,wasm`,
      { code: "artifact-unsuitable" },
    );
  return backend;
}

function readModel(model: Field<format.ModelRecord>): ModelInfo {
  return {
    name: model.at("name").string(),
    architecture: model.at("architecture").string(),
    vocabSize: model.at("vocab_size").int(1),
    contextLength: model.at("context_length").int(1),
    bosTokenId: model.at("bos_token_id").optional()?.int() ?? null,
    eosTokenIds: model.at("eos_token_ids").list((id) => id.int()),
    task: model.at("task").optional()?.oneOf(["generate", "embed"]) ?? "generate",
  };
}

function readCache(cache: Field<format.KvCacheRecord>): CacheInfo {
  return {
    kvHeads: cache.at("kv_heads").int(1),
    headDim: cache.at("head_dim").int(1),
    group: cache.at("group").int(),
    parts: cache.at("parts").optional()?.oneOf(["kv", "k", "state"]) ?? "kv",
    depth: cache.at("depth").optional()?.int() ?? 0,
  };
}

function readRope(rope: Field<format.RopeRecord>): RopeInfo {
  const short = rope.at("short").optional();
  return {
    invFreq: rope.at("inv_freq").string(),
    scale: rope.at("scale").number(),
    short: short && { invFreq: short.at("inv_freq").string(), context: short.at("context").int(1) },
  };
}

function readFile(entry: Field<format.FileRecord>): FileEntry {
  return {
    file: entry.at("file").file(),
    bytes: entry.at("bytes").int(),
    sha256: entry.at("sha256").sha256(),
  };
}

function readBundleFile(bundle: Field<format.PackRecord>): BundleFile {
  const { file, bytes, sha256 } = readFile(bundle);
  return { file, bytes, sha256, program: bundle.at("program").optional()?.string() ?? null };
}

function readWeights(weights: Field<format.WeightsRecord>): Manifest["weights"] {
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

function readDim(dim: Field<number | string>): Dim {
  if (typeof dim.value !== "string") return dim.int();
  return dim.matching(/^(context|pages\.\d{1,2})$/, "a number, context or pages.<group>") as Dim;
}

function readBuffer(buffer: Field<format.BufferRecord>): BufferEntry {
  return {
    name: buffer.at("name").string(),
    dtype: buffer.at("dtype").oneOf([...DTYPES, "kv"]),
    shape: buffer.at("shape").list(readDim),
  };
}

function readProgram(
  program: Field<format.ProgramRecord>,
  target: BackendName,
  task: ModelInfo["task"],
): Program {
  const isWasm = target === "wasm";
  const kernels = program.at("kernels");
  const functions = program.at("functions");
  const buckets = (name: FunctionName): FunctionEntry[] =>
    task === "generate" || name === "step" ? functions.at(name).list(readFunction) : [];
  const requires = program.at("requires");
  return {
    name: program.at("name").string(),
    activations: program.at("activations").oneOf(FLOATS),
    kvDtype: program.at("kv_dtype").oneOf(KV_DTYPES),
    requires: {
      features: requires.at("features").list((feature) => feature.string()),
      limits:
        requires
          .at("limits")
          .optional()
          ?.record((limit) => limit.int()) ?? new Map(),
    },
    workspace: program.at("workspace").list((bytes) => bytes.int()),
    deviceClass: program.at("device_class").optional()?.oneOf(format.DEVICE_CLASSES) ?? null,
    kernels: isWasm ? new Map() : kernels.record(readKernel),
    routines: isWasm ? kernels.record((kernel) => kernel.at("params").list(readParam)) : new Map(),
    library: isWasm ? readLibrary(program) : null,
    functions: {
      step: buckets("step"),
      greedy: buckets("greedy"),
      sample: buckets("sample"),
      logprobs: buckets("logprobs"),
    },
  };
}

function readParam(param: Field<format.KernelParamRecord>): KernelParam {
  return { dtype: param.at("dtype").oneOf(DTYPES), shape: param.at("shape").list(readDim) };
}

function readLibrary(program: Field<format.ProgramRecord>): LibraryEntry {
  return { file: program.at("library").file(), sha256: program.at("library_sha256").sha256() };
}

function readKernel(kernel: Field<format.KernelRecord>): KernelEntry {
  return {
    file: kernel.at("file").file(),
    entry: kernel.at("entry").string(),
    access: kernel.at("access").list((access) => access.oneOf(["read", "read_write"])),
    sha256: kernel.at("sha256").sha256(),
  };
}

function readFunction(entry: Field<format.FunctionRecord>): FunctionEntry {
  return {
    size: entry.at("size").int(1),
    rows: entry.at("rows").int(1),
    plan: entry.at("plan").file(),
    sha256: entry.at("sha256").sha256(),
  };
}
