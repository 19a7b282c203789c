import { DTYPE_BYTES, FUNCTIONS, MAX_ROWS, MAX_STEP } from "../format/constants.js";
import { ArtifactError } from "../protocol/errors.js";
import { buffersOf } from "./buffers.js";
import {
  allFrequencies,
  type BufferEntry,
  type FunctionName,
  type Manifest,
  type ModelInfo,
  type Program,
} from "./manifest.js";

/** Checks that the facts of a manifest are consistent, beyond their types, before anything is allocated. */

export function checkManifest(manifest: Manifest): void {
  if (manifest.programs.length === 0)
    throw new ArtifactError("manifest.json lists no programs. Build the artifact again.");
  checkModel(manifest.model);
  checkCaches(manifest);
  checkWeights(manifest);
  checkRopes(manifest);
  checkBuffers(manifest);
  manifest.programs.forEach(({ name }, i, all) => {
    if (all.findIndex((program) => program.name === name) < i)
      throw new ArtifactError(`Two programs have the name ${name}. Build the artifact again.`);
  });
  checkFiles(manifest);
  for (const program of manifest.programs)
    for (const name of functionsOf(manifest.model)) checkBuckets(program, name);
}

function functionsOf({ task }: ModelInfo): readonly FunctionName[] {
  return task === "embed" ? ["step"] : FUNCTIONS;
}

/** Programs may share a file, and must then state the same size and digest for it. */
function checkFiles({ programs }: Manifest): void {
  const hashes = new Map<string, string>();
  for (const { name, kernels } of programs)
    for (const [kernel, { file, sha256 }] of kernels) {
      const known = hashes.get(file) ?? sha256;
      if (known !== sha256)
        throw new ArtifactError(`The program ${name} lists ${kernel} in ${file} with another SHA-256.`);
      hashes.set(file, sha256);
    }
}

function checkModel({ bosTokenId, eosTokenIds, vocabSize }: ModelInfo): void {
  for (const token of [...eosTokenIds, bosTokenId ?? 0])
    if (token >= vocabSize)
      throw new ArtifactError(`The special token ${token} is not below the vocabulary's size, ${vocabSize}.`);
}

/** Every group has a cache and a window of its own, and every cache has a group. */
function checkCaches({ groups, caches }: Manifest): void {
  const used = new Set(caches.map(({ group }) => group));
  if (used.size !== groups.length || Math.max(...used) !== groups.length - 1)
    throw new ArtifactError(
      `The caches are of groups ${[...used].sort((a, b) => a - b)}, and there are ${groups.length} groups.`,
    );
  const windows = groups.map(({ window }) => window);
  if (new Set(windows).size < windows.length)
    throw new ArtifactError(`Two groups have the same window: ${windows.map((window) => window ?? "none")}.`);
}

/**
 * Every function needs a bucket, the sizes of its buckets ascend, and a bucket has at most as many rows of
 * results as the buffers hold.
 */
function checkBuckets({ name: program, functions }: Program, name: FunctionName): void {
  const buckets = functions[name];
  if (buckets.length === 0)
    throw new ArtifactError(`The program ${program} has no bucket of ${name}. Build the artifact again.`);
  buckets.forEach(({ size, rows }, i) => {
    if (size <= (buckets[i - 1]?.size ?? 0))
      throw new ArtifactError(`The program ${program} lists ${name} of size ${size} twice, or out of order.`);
    const fits = size <= MAX_STEP && rows <= Math.min(size, MAX_ROWS);
    if (!fits || (name !== "step" && rows !== size))
      throw new ArtifactError(
        `The program ${program} lists ${name} of size ${size} with ${rows} rows, which the buffers do not ` +
          "hold.",
      );
  });
}

/** The shards must hold exactly the stream of the tensors. */
function checkWeights({ weights }: Manifest): void {
  const { shards, shardBytes, bytes, tensors } = weights;
  shards.forEach((shard, i) => {
    const expected = Math.min(shardBytes, bytes - i * shardBytes);
    if (shard.bytes !== expected)
      throw new ArtifactError(
        `${shard.file} is listed with ${shard.bytes} bytes; its place in the stream is ${expected}.`,
      );
  });
  const held = shards.reduce((sum, shard) => sum + shard.bytes, 0);
  if (held !== bytes)
    throw new ArtifactError(`The weight shards hold ${held} bytes, manifest.json states ${bytes}.`);
  for (const tensor of tensors) {
    const end = tensor.offset + tensor.bytes;
    if (tensor.offset % 256 !== 0)
      throw new ArtifactError(
        `The tensor ${tensor.name} begins at byte ${tensor.offset}, no multiple of 256.`,
      );
    if (end > bytes)
      throw new ArtifactError(
        `The tensor ${tensor.name} [${tensor.offset}, ${end}) lies outside the ${bytes} bytes of weights.`,
      );
    const size = tensor.shape.reduce((product, dim) => product * dim, DTYPE_BYTES[tensor.dtype]);
    if (size !== tensor.bytes)
      throw new ArtifactError(
        `The tensor ${tensor.name} has ${tensor.bytes} bytes; its shape and dtype need ${size}.`,
      );
  }
  const ordered = [...tensors].sort((a, b) => a.offset - b.offset || a.bytes - b.bytes);
  ordered.forEach((tensor, i) => {
    const last = ordered[i - 1];
    if (last && last.offset + last.bytes > tensor.offset)
      throw new ArtifactError(`The tensors ${last.name} and ${tensor.name} overlap.`);
  });
  if (new Set(tensors.map(({ name }) => name)).size < tensors.length)
    throw new ArtifactError("The weights name a tensor twice.");
}

function checkRopes({ ropes, caches, weights }: Manifest): void {
  const lengths = new Set(caches.map(({ headDim }) => headDim / 2));
  for (const [name, rope] of ropes) {
    for (const frequencies of allFrequencies(rope)) {
      const tensor = weights.tensors.find((candidate) => candidate.name === frequencies);
      if (!tensor)
        throw new ArtifactError(
          `The weights lack the tensor ${frequencies} that manifest.json names for rope ${name}.`,
        );
      if (tensor.dtype !== "float32" || tensor.shape.length !== 1 || !lengths.has(tensor.shape[0] ?? 0))
        throw new ArtifactError(
          `The tensor ${frequencies} is ${tensor.dtype} [${tensor.shape}]; rope ${name} needs float32 ` +
            `[${[...lengths].join("] or [")}].`,
        );
    }
    const { scale } = rope;
    if (!(scale > 0)) throw new ArtifactError(`The scale of rope ${name} is ${scale}; it should be above 0.`);
  }
}

/** A runtime cannot fill a buffer that it does not know, and would fill one of another shape wrongly. */
function checkBuffers(manifest: Manifest): void {
  const listed = new Map(manifest.buffers.map((buffer) => [buffer.name, buffer]));
  if (listed.size < manifest.buffers.length) throw new ArtifactError("manifest.json lists a buffer twice.");
  for (const expected of buffersOf(manifest)) {
    const found = listed.get(expected.name);
    if (!found)
      throw new ArtifactError(`manifest.json lacks the buffer ${expected.name}. Build the artifact again.`);
    if (shown(found) !== shown(expected))
      throw new ArtifactError(
        `The buffer ${found.name} is ${shown(found)}; by its model and caches it should be ` +
          `${shown(expected)}.`,
      );
    listed.delete(expected.name);
  }
  for (const name of listed.keys())
    throw new ArtifactError(
      `manifest.json lists the buffer ${name}, which this runtime does not know. Upgrade nearfar.`,
    );
}

function shown({ dtype, shape }: BufferEntry): string {
  return `${dtype} [${shape.join(", ")}]`;
}
