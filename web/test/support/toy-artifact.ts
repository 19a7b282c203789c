import { createHash } from "node:crypto";
import { deflateSync } from "node:zlib";
import {
  FORMAT,
  MAX_ROWS,
  ROW_BUCKETS,
  SAMPLE_COLUMNS,
  SAMPLE_I32,
  STEP_BUCKETS,
  TOP_LOGPROBS,
  VERSION,
} from "../../src/format/constants.js";
import { buffersFor } from "./buffers.js";
import { expectedTokens } from "./fake-backend.js";
import { seal } from "./seal.js";

/**
 * A whole artifact small enough to write by hand, whose "model" is that of FakeBackend: the next token is a
 * hash of the tokens that a row sees through the page table. Its vocabulary is printable ASCII.
 */
export interface ToyArtifact {
  /** Files by their path in the artifact. */
  readonly files: Map<string, Uint8Array>;
}

export const TOY_VOCAB = 97;
const SHARD_BYTES = 512;
export const TOY_PAGE_SIZE = 4;
const PAGE_SIZE = TOY_PAGE_SIZE;
const SLOTS = 4;
const CONTEXT = 256;
export const PAGES_PER_SLOT = CONTEXT / PAGE_SIZE;
export const MARKS = 300;
export const HEAD_DIM = 4;
export const SIZES = STEP_BUCKETS.filter((size) => size <= 64);

/** Writes each row's token into its place in the cache. */
const appendKernel = (rows: number): string => `
struct Grid { packGridDimX: u32 }
@group(0) @binding(0) var<storage, read> tokens: array<i32>;
@group(0) @binding(1) var<storage, read> positions: array<i32>;
@group(0) @binding(2) var<storage, read> slots: array<i32>;
@group(0) @binding(3) var<storage, read> page_table: array<i32>;
@group(0) @binding(4) var<storage, read_write> cache: array<f32>;
@group(0) @binding(5) var<uniform> grid: Grid;
@compute @workgroup_size(1) fn append_kernel(@builtin(workgroup_id) block: vec3<u32>) {
  let m = block.x;
  if (m > grid.packGridDimX || m >= ${rows}u) { return; }
  let p = positions[m];
  if (p < 0) { return; }
  let page = page_table[slots[m] * ${PAGES_PER_SLOT} + p / ${PAGE_SIZE}];
  cache[(page * ${PAGE_SIZE} + p % ${PAGE_SIZE}) * ${HEAD_DIM}] = f32(tokens[m]);
}`;

/** Hashes the tokens that each logits row sees; gives token 0 if the weights are incomplete. */
const lookKernel = (rows: number): string => `
struct Grid { packGridDimX: u32 }
@group(0) @binding(0) var<storage, read> marks: array<u32>;
@group(0) @binding(1) var<storage, read> positions: array<i32>;
@group(0) @binding(2) var<storage, read> slots: array<i32>;
@group(0) @binding(3) var<storage, read> page_table: array<i32>;
@group(0) @binding(4) var<storage, read> cache: array<f32>;
@group(0) @binding(5) var<storage, read> logit_rows: array<i32>;
@group(0) @binding(6) var<storage, read_write> logits: array<f32>;
@group(0) @binding(7) var<uniform> grid: Grid;
@compute @workgroup_size(1) fn look_kernel(@builtin(workgroup_id) block: vec3<u32>) {
  let r = block.x;
  if (r > grid.packGridDimX || r >= ${rows}u) { return; }
  let m = logit_rows[r];
  var h = 0x811c9dc5u;
  for (var p = 0; p <= positions[m]; p++) {
    let page = page_table[slots[m] * ${PAGES_PER_SLOT} + p / ${PAGE_SIZE}];
    h = (h ^ u32(cache[(page * ${PAGE_SIZE} + p % ${PAGE_SIZE}) * ${HEAD_DIM}])) * 0x01000193u;
  }
  var token = (((0x811c9dc5u ^ h) * 0x01000193u) >> 8) % ${TOY_VOCAB - 1}u + 1;
  for (var i = 0u; i < ${MARKS}u; i++) { if (marks[i] != i * 3) { token = 0; } }
  for (var v = 0u; v < ${TOY_VOCAB}u; v++) { logits[r * ${TOY_VOCAB}u + v] = select(0.0, 1.0, v == token); }
}`;

const greedyKernel = (rows: number): string => `
struct Grid { packGridDimX: u32 }
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> sample_i32: array<i32>;
@group(0) @binding(2) var<storage, read_write> sampled: array<i32>;
@group(0) @binding(3) var<storage, read_write> tokens: array<i32>;
@group(0) @binding(4) var<uniform> grid: Grid;
@compute @workgroup_size(1) fn greedy_kernel(@builtin(workgroup_id) block: vec3<u32>) {
  let r = i32(block.x);
  if (block.x > grid.packGridDimX || r >= ${rows} || sample_i32[r * ${SAMPLE_COLUMNS} + ${SAMPLE_I32.slot}] < 0) { return; }
  var best = 0;
  for (var v = 1; v < ${TOY_VOCAB}; v++) {
    if (logits[r * ${TOY_VOCAB} + v] > logits[r * ${TOY_VOCAB} + best]) { best = v; }
  }
  sampled[r] = best;
  let feed = sample_i32[r * ${SAMPLE_COLUMNS} + ${SAMPLE_I32.feed}];
  if (feed >= 0) { tokens[feed] = best; }
}`;

const WORDS = Math.ceil(TOY_VOCAB / 32);

/** The likeliest token, or the next after it that is allowed. */
const sampleKernel = (rows: number): string => `
struct Grid { packGridDimX: u32 }
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> sample_i32: array<i32>;
@group(0) @binding(2) var<storage, read> allowed: array<u32>;
@group(0) @binding(3) var<storage, read_write> sampled: array<i32>;
@group(0) @binding(4) var<storage, read_write> tokens: array<i32>;
@group(0) @binding(5) var<uniform> grid: Grid;
@compute @workgroup_size(1) fn sample_kernel(@builtin(workgroup_id) block: vec3<u32>) {
  let r = i32(block.x);
  let slot = sample_i32[r * ${SAMPLE_COLUMNS} + ${SAMPLE_I32.slot}];
  if (block.x > grid.packGridDimX || r >= ${rows} || slot < 0) { return; }
  var best = 0;
  for (var v = 1; v < ${TOY_VOCAB}; v++) {
    if (logits[r * ${TOY_VOCAB} + v] > logits[r * ${TOY_VOCAB} + best]) { best = v; }
  }
  for (var i = 0; i < ${TOY_VOCAB}; i++) {
    let v = (best + i) % ${TOY_VOCAB};
    if (((allowed[slot * ${WORDS} + v / 32] >> u32(v % 32)) & 1u) == 1u) { best = v; break; }
  }
  sampled[r] = best;
  let feed = sample_i32[r * ${SAMPLE_COLUMNS} + ${SAMPLE_I32.feed}];
  if (feed >= 0) { tokens[feed] = best; }
}`;

/** Gives the chosen token a probability of 1. */
const scoreKernel = (rows: number): string => `
struct Grid { packGridDimX: u32 }
@group(0) @binding(0) var<storage, read> sampled: array<i32>;
@group(0) @binding(1) var<storage, read_write> logprob: array<f32>;
@group(0) @binding(2) var<storage, read_write> top_ids: array<i32>;
@group(0) @binding(3) var<storage, read_write> top_logprobs: array<f32>;
@group(0) @binding(4) var<uniform> grid: Grid;
@compute @workgroup_size(1) fn score_kernel(@builtin(workgroup_id) block: vec3<u32>) {
  let r = block.x;
  if (r > grid.packGridDimX || r >= ${rows}u) { return; }
  logprob[r] = 0.0;
  for (var i = 0u; i < ${TOP_LOGPROBS}u; i++) {
    top_ids[r * ${TOP_LOGPROBS}u + i] = select(i32(i), sampled[r], i == 0u);
    top_logprobs[r * ${TOP_LOGPROBS}u + i] = select(-100.0, 0.0, i == 0u);
  }
}`;

/** Token 0 is BOS, 1…95 are the printable characters, 96 ends an answer (never, where the toy hashes). */
function tokenizer(instead: Readonly<Record<string, string>>): object {
  const printable = Array.from({ length: 95 }, (_, i) => String.fromCharCode(32 + i));
  const characters = printable.map((character) => instead[character] ?? character);
  const vocab = Object.fromEntries(["<s>", ...characters, "</s>"].map((token, id) => [token, id]));
  const special = { single_word: false, lstrip: false, rstrip: false, normalized: false, special: true };
  return {
    version: "1.0",
    added_tokens: [
      { id: 0, content: "<s>", ...special },
      { id: 96, content: "</s>", ...special },
    ],
    normalizer: null,
    pre_tokenizer: null,
    post_processor: null,
    decoder: { type: "Fuse" },
    model: { type: "BPE", vocab, merges: [], unk_token: null, byte_fallback: false, fuse_unk: false },
  };
}

/** Files as they are put into the artifact. */
export class Files extends Map<string, Uint8Array> {
  put(file: string, content: string | Uint8Array): { file: string; bytes: number; sha256: string } {
    const bytes = typeof content === "string" ? new TextEncoder().encode(content) : content;
    this.set(file, bytes);
    return { file, bytes: bytes.length, sha256: createHash("sha256").update(bytes).digest("hex") };
  }
}

function weights(files: Files, build: number, shardBytes: number) {
  const stream = new Uint8Array(256 + MARKS * 4);
  // Between the two tensors.
  stream[100] = build;
  new Float32Array(stream.buffer, 0, 2).set([1, 0.01]);
  new Uint32Array(stream.buffer, 256, MARKS).set(Array.from({ length: MARKS }, (_, i) => i * 3));
  const shards = [];
  for (let start = 0; start < stream.length; start += shardBytes)
    shards.push(files.put(`weights/0000${shards.length}.bin`, stream.slice(start, start + shardBytes)));
  const tensors = [
    { name: "rope.base.inv_freq", dtype: "float32", shape: [HEAD_DIM / 2], offset: 0, bytes: 8 },
    { name: "marks", dtype: "uint32", shape: [MARKS], offset: 256, bytes: MARKS * 4 },
  ];
  return { bytes: stream.length, shard_bytes: shardBytes, shards, tensors };
}

/** The packs of docs/artifact.md: one of the tokenizer, and one that the programs share. */
function packs(files: Files, stale: string): object[] {
  const put = (name: string, of: RegExp): ReturnType<Files["put"]> => {
    const own = (file: string, bytes: Uint8Array) => (file === stale ? bytes.slice().fill(32, 0, 1) : bytes);
    const held = [...files]
      .filter(([file]) => of.test(file))
      .map(([file, bytes]) => [file, own(file, bytes)] as const);
    const index = JSON.stringify(held.map(([file, { length }]) => [file, length]));
    const content = Buffer.concat([Buffer.from(`${index}\n`), ...held.map(([, bytes]) => bytes)]);
    return files.put(`packs/${name}.bin`, new Uint8Array(deflateSync(content)));
  };
  const names = [...files.keys()].flatMap((file) => /^kernels\/([\w-]+)\//.exec(file)?.[1] ?? []);
  const own = [...new Set(names)].map((program) => ({
    ...put(`program-${program}`, /^(kernels|plans)\//),
    program,
  }));
  return [put("tokenizer", /^tokenizer\//), ...own];
}

export const LOOK_ARGS = "positions slots page_table.0 kv.0.k logit_rows logits";

function program(files: Files, { features = [], invalid }: ToyOptions, name: string): object {
  const kernels: Record<string, object> = {};
  /** A launch of a kernel; `access` has a letter for each argument. */
  const launch = (
    name: string,
    rows: number,
    access: string,
    code: string,
    args: string,
    weight?: string,
  ): object => {
    const kernel = `${name}_${rows}`;
    const modes = [...access].map((mode) => (mode === "w" ? "read_write" : "read"));
    const shader = files.put(`kernels/f32/${kernel}.wgsl`, name === invalid ? `${code}\nfn half( {` : code);
    kernels[kernel] = { ...shader, entry: `${name}_kernel`, access: modes };
    const named = args.split(" ").map((arg) => `buffer:${arg}`);
    return { kernel, grid: [rows, 1, 1], args: weight ? [`weight:${weight}`, ...named] : named };
  };
  const plan = (name: string, size: number, launches: object[]): object => {
    const path = `plans/f32/${name}.${size}.json`;
    const rows = Math.min(size, MAX_ROWS);
    const { sha256 } = files.put(path, JSON.stringify({ function: name, size, rows, launches }));
    return { size, rows, plan: path, sha256 };
  };
  const step = SIZES.map((size) => {
    const rows = Math.min(size, MAX_ROWS);
    const append = launch(
      "append",
      size,
      "rrrrw",
      appendKernel(size),
      "tokens positions slots page_table.0 kv.0.k",
    );
    const look = launch("look", rows, "rrrrrrw", lookKernel(rows), LOOK_ARGS, "marks");
    return plan("step", size, [append, look]);
  });
  const greedy = ROW_BUCKETS.map((size) =>
    plan("greedy", size, [
      launch("greedy", size, "rrww", greedyKernel(size), "logits sample_i32 sampled tokens"),
    ]),
  );
  /** Samples the likeliest allowed token, whatever the parameters are. */
  const sample = ROW_BUCKETS.map((size) =>
    plan("sample", size, [
      launch("sample", size, "rrrww", sampleKernel(size), "logits sample_i32 allowed sampled tokens"),
    ]),
  );
  const told = "sampled logprob top_ids top_logprobs";
  const logprobs = ROW_BUCKETS.map((size) =>
    plan("logprobs", size, [launch("score", size, "rwww", scoreKernel(size), told)]),
  );
  return {
    name,
    activations: "float32",
    kv_dtype: "float32",
    requires: { features, limits: { maxStorageBuffersPerShaderStage: 8 } },
    workspace: [],
    kernels,
    functions: { step, greedy, sample, logprobs },
  };
}

export interface ToyOptions {
  /** A kernel whose code is not valid. */
  readonly invalid?: "score";
  /** Names of its programs, which all compute the same; one by default. */
  readonly programs?: readonly string[];
  /** Features that the artifact's programs require. */
  readonly features?: readonly string[];
  /** Another build has another first shard; 0 to 255. */
  readonly build?: number;
  /** The chat template, which makes it a chat model. */
  readonly chatTemplate?: string | undefined;
  /** Characters that tokens stand for instead of their own. */
  readonly instead?: Readonly<Record<string, string>>;
  readonly contextLength?: number;
  /** How the weights are cut: into three by default. */
  readonly shardBytes?: number;
  readonly eosTokenIds?: readonly number[];
  /** Further fields of the manifest. */
  readonly more?: object;
  /** Whether the artifact has packs, as builds write them now. */
  readonly packed?: boolean;
  /** The pack holds another file of this name. */
  readonly stale?: string;
  /** Programs of another backend that replace the shaders. */
  readonly other?: (files: Files) => { readonly target: string; readonly programs: readonly object[] };
}

export function toyArtifact(options: ToyOptions = {}): ToyArtifact {
  const { build = 0, packed = false, stale = "", chatTemplate, other, more } = options;
  const { instead = {}, eosTokenIds = [], programs = ["f32"] } = options;
  const files = new Files();
  const facts = {
    model: {
      name: "toy",
      architecture: "hash",
      vocab_size: TOY_VOCAB,
      context_length: options.contextLength ?? CONTEXT,
      bos_token_id: 0,
      eos_token_ids: eosTokenIds,
    },
    cache: { page_size: PAGE_SIZE, slots: SLOTS },
    groups: [{ window: null }],
    caches: [{ kv_heads: 1, head_dim: HEAD_DIM, group: 0 }],
    ropes: { base: { inv_freq: "rope.base.inv_freq", scale: 1 } },
    weights: weights(files, build, options.shardBytes ?? SHARD_BYTES),
  };
  const runs = other?.(files) ?? {
    target: "webgpu",
    programs: programs.map((name) => program(files, options, name)),
  };
  const tokenizerFiles = [
    files.put("tokenizer/tokenizer.json", JSON.stringify(tokenizer(instead))),
    files.put(
      "tokenizer/tokenizer_config.json",
      JSON.stringify({ tokenizer_class: "PreTrainedTokenizerFast", chat_template: chatTemplate }),
    ),
  ];
  const manifest = {
    format: FORMAT,
    version: VERSION,
    ...runs,
    ...facts,
    step: { ops: [], params: [] },
    quantization: { scheme: "none" },
    buffers: buffersFor(facts),
    tokenizer: { files: tokenizerFiles },
    ...(packed && { packs: packs(files, stale) }),
    license: null,
    ...more,
  };
  files.put("manifest.json", seal(manifest));
  return { files };
}

/** The text that the toy model gives after `prompt`. */
export function expectedText(prompt: string, count: number): string {
  const ids = prompt === "" ? [0] : [...prompt].map((character) => character.charCodeAt(0) - 31);
  return expectedTokens(ids, count, TOY_VOCAB)
    .map((id) => (id === 0 || id === 96 ? "" : String.fromCharCode(id + 31)))
    .join("");
}
