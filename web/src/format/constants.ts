// Written by `python -m nearfar.format.generate` from nearfar.format: change it there.

/** The first word of a manifest. */
export const FORMAT = "nearfar-artifact";

/** The `format` of a listing that a server may send if a folder of several targets has no manifest.json. */
export const LISTING = "nearfar-targets";

/** The newest version of the format that a reader reads. */
export const VERSION = 5;

/** The oldest version that is read. */
export const OLDEST = 3;

/** The manifest's key for its own digest. */
export const DIGEST = "manifest_sha256";

/** Rows of the largest bucket: the length of `tokens`, `positions`, `slots`. */
export const MAX_STEP = 256;

/** Rows of logits, and sequences in flight (slots). */
export const MAX_ROWS = 16;

/** Rows of the buckets that a build makes for `step`. */
export const STEP_BUCKETS = [1, 4, 16, 64, 256] as const;

/** Rows of the buckets that a build makes for `greedy`, `sample` and `logprobs`. */
export const ROW_BUCKETS = [1, 4, 16] as const;

/** The number of likeliest tokens that `logprobs` gives for a row. */
export const TOP_LOGPROBS = 20;

/** Tokens in a page of the cache. */
export const PAGE_SIZE = 16;

/** wasm: bytes at the beginning of the memory that belong to the module: its stack and static data. */
export const WASM_RESERVED = 2097152;

/** wasm: bytes of the stack that the host gives to each further thread. */
export const WASM_STACK = 262144;

/**
 * Roles of messages that every chat template accepts; other roles (ipython, document) need a template that
 * names them.
 */
export const ROLES = ["system", "developer", "user", "assistant", "tool"] as const;

/** The most answers to one prompt (`n`): OpenAI's limit, and far more than a device's slots run at once. */
export const MAX_CHOICES = 128;

/** The most tools of a request, and the most calls of a message. */
export const MAX_TOOLS = 128;

/** The most bytes of all tools of a request as JSON in UTF-8 without blanks. Schemas have another bound. */
export const MAX_TOOLS_BYTES = 1048576;

/**
 * The most bytes of the schemas of all tools that an answer may call, as JSON without descriptions and other
 * annotations: a grammar is compiled from them.
 */
export const MAX_SCHEMAS_BYTES = 65536;

/** The most bytes of a grammar that a request gives: of its text, or of its schema as JSON. */
export const MAX_GRAMMAR_BYTES = 65536;

/** The most texts of a request for embeddings: OpenAI's limit. LangChain sends 1,000. */
export const MAX_INPUTS = 2048;

/** The most strings that end an answer. */
export const MAX_STOPS = 16;

/** The most variables for the chat template. */
export const MAX_VARIABLES = 16;

/** The most values of a variable that is a list. */
export const MAX_LISTED = 256;

/** The most labels of a decision. */
export const MAX_LABELS = 256;

/** The most characters of a label. */
export const MAX_LABEL_CHARS = 1000;

/** Kinds of GPUs that programs are shaped for; `software` is a software GPU. */
export const DEVICE_CLASSES = ["software", "mobile", "integrated", "discrete"] as const;

/** The first rule that an adapter matches counts; the last rule matches every adapter. */
export const RULES = [
  { deviceClass: "software", kinds: ["cpu"], vendors: [], words: [] },
  { deviceClass: "software", kinds: [], vendors: [], words: ["swiftshader", "llvmpipe", "lavapipe"] },
  { deviceClass: "software", kinds: [], vendors: [], words: ["softpipe", "basic render"] },
  { deviceClass: "mobile", kinds: ["mobile"], vendors: [], words: [] },
  { deviceClass: "mobile", kinds: [], vendors: ["qualcomm", "arm", "img-tec", "samsung"], words: [] },
  { deviceClass: "mobile", kinds: [], vendors: [], words: ["adreno", "mali", "immortalis", "apple a"] },
  { deviceClass: "mobile", kinds: [], vendors: [], words: ["powervr", "xclipse", "videocore"] },
  { deviceClass: "integrated", kinds: ["integrated"], vendors: [], words: [] },
  { deviceClass: "integrated", kinds: [], vendors: ["intel", "apple"], words: [] },
  { deviceClass: "discrete", kinds: ["discrete"], vendors: [], words: [] },
  { deviceClass: "integrated", kinds: [], vendors: [], words: ["radeon graphics", "radeon(tm) graphics"] },
  { deviceClass: "integrated", kinds: [], vendors: [], words: ["intel", "apple m"] },
  { deviceClass: "discrete", kinds: [], vendors: ["nvidia", "amd"], words: [] },
  { deviceClass: "discrete", kinds: [], vendors: [], words: ["nvidia", "geforce", "radeon"] },
  { deviceClass: "integrated", kinds: [], vendors: [], words: [] },
] as const;

/**
 * For a device's class, the classes in the order in which their programs suit it: its own, its neighbour's,
 * the others.
 */
export const NEARNESS = {
  software: ["software", "mobile", "integrated", "discrete"],
  mobile: ["mobile", "integrated", "discrete", "software"],
  integrated: ["integrated", "discrete", "mobile", "software"],
  discrete: ["discrete", "integrated", "mobile", "software"],
} as const;

/** What a program can run. */
export const FUNCTIONS = ["step", "greedy", "sample", "logprobs"] as const;

/** Bytes of an element of each dtype. */
export const DTYPE_BYTES = {
  float32: 4,
  float16: 2,
  int32: 4,
  uint32: 4,
  int16: 2,
  uint16: 2,
  int8: 1,
  uint8: 1,
} as const;

/** Bits of a code, by the dtype of a quantized cache. */
export const KV_BITS = {
  int8: 8,
  int4: 4,
} as const;

/**
 * Sizes of groups that share a scale, by dtype: the first that divides head_dim is used. 4 bits need the
 * smaller groups.
 */
export const KV_GROUPS = {
  int8: [64, 32],
  int4: [32],
} as const;

/** Columns of `sample_f32` and `sample_i32`. */
export const SAMPLE_COLUMNS = 8;

/** Columns of `sample_f32`. Columns without a name are 0. */
export const SAMPLE_F32 = {
  temperature: 0,
  topP: 1,
  minP: 2,
  repetitionPenalty: 3,
  presencePenalty: 4,
  frequencyPenalty: 5,
} as const;

/** Columns of `sample_i32`. Columns without a name are 0. */
export const SAMPLE_I32 = {
  slot: 0,
  topK: 1,
  seedLow: 2,
  seedHigh: 3,
  counter: 4,
  feed: 5,
} as const;

/** The bit of `counts` that marks tokens of the prompt; the bits below count the token in the answer. */
export const PROMPT_FLAG = 16777216;

/** Every buffer that plans name; what is in words depends on the model. */
export const BUFFERS = {
  tokens: { dtype: "int32", shape: [256] },
  positions: { dtype: "int32", shape: [256] },
  slots: { dtype: "int32", shape: [256] },
  "page_table.<g>": { dtype: "int32", shape: ["slots", "pages_per_slot"] },
  logit_rows: { dtype: "int32", shape: [16] },
  "rope.<name>": { dtype: "float32", shape: ["context", "head_dim"] },
  logits: { dtype: "float32", shape: [16, "vocab"] },
  embedding: { dtype: "float32", shape: [16, "embedding"] },
  sample_f32: { dtype: "float32", shape: [16, 8] },
  sample_i32: { dtype: "int32", shape: [16, 8] },
  logit_bias: { dtype: "float32", shape: ["slots", "vocab"] },
  counts: { dtype: "int32", shape: ["slots", "vocab"] },
  allowed: { dtype: "uint32", shape: ["slots", "vocab_words"] },
  sampled: { dtype: "int32", shape: [16] },
  logprob: { dtype: "float32", shape: [16] },
  top_ids: { dtype: "int32", shape: [16, 20] },
  top_logprobs: { dtype: "float32", shape: [16, 20] },
  "kv.<c>.k": { dtype: "kv", shape: ["pages.<g>", "kv_heads", "page_size", "head_dim"] },
  "kv.<c>.v": { dtype: "kv", shape: ["pages.<g>", "kv_heads", "page_size", "head_dim"] },
  "kv.<c>.x": { dtype: "float32", shape: ["pages.<g>", "kv_heads", "page_size", "head_dim"] },
  "kv.<c>.s": { dtype: "float32", shape: ["pages.<g>", "kv_heads", "depth", "head_dim"] },
} as const;

/** The buffers that only artifacts with logits have. */
export const OF_LOGITS = [
  "logits",
  "sample_f32",
  "sample_i32",
  "logit_bias",
  "counts",
  "allowed",
  "sampled",
  "logprob",
  "top_ids",
  "top_logprobs",
] as const;

/** What a buffer can be called. */
export type BufferName =
  | "tokens"
  | "positions"
  | "slots"
  | `page_table.${number}`
  | "logit_rows"
  | `rope.${string}`
  | "logits"
  | "embedding"
  | "sample_f32"
  | "sample_i32"
  | "logit_bias"
  | "counts"
  | "allowed"
  | "sampled"
  | "logprob"
  | "top_ids"
  | "top_logprobs"
  | `kv.${number}.k`
  | `kv.${number}.v`
  | `kv.${number}.x`
  | `kv.${number}.s`;

/**
 * The facts about a model that a runtime needs, and its special tokens. `step` says what the model computes.
 */
export interface ModelRecord {
  readonly name: string;
  readonly architecture: string;
  readonly vocab_size: number;
  readonly context_length: number;
  readonly bos_token_id: number | null;
  readonly eos_token_ids: readonly number[];
  readonly task?: "generate" | "embed";
}

/** Geometry of the paged cache. */
export interface CacheRecord {
  readonly page_size: number;
  readonly slots: number;
}

/** Caches of layers that look equally far back. Each group has pages and a page table of its own. */
export interface GroupRecord {
  readonly window?: number | null;
  readonly stride?: number | null;
}

/**
 * What a layer keeps in pages, and other layers may read too. `parts`: "kv" is keys and values, "k" one
 * tensor, "state" a matrix [depth, head_dim] for each head.
 */
export interface KvCacheRecord {
  readonly kv_heads: number;
  readonly head_dim: number;
  readonly group: number;
  readonly parts?: "kv" | "k" | "state";
  readonly depth?: number;
}

/** LongRoPE's short set: the frequencies of engines whose context is at most `context`. */
export interface ShortRopeRecord {
  readonly inv_freq: string | readonly number[];
  readonly context: number;
}

/**
 * How the runtime makes a buffer `rope.<name>`: frequencies (mlx) or the tensor that holds them, and a
 * factor.
 */
export interface RopeRecord {
  readonly inv_freq: string | readonly number[];
  readonly scale: number;
  readonly short?: ShortRopeRecord | null;
}

/** The step as data: operations and parameters as nearfar.step.model writes and reads them. */
export interface StepRecord {
  readonly ops: readonly Readonly<Record<string, unknown>>[];
  readonly params: readonly Readonly<Record<string, unknown>>[];
}

/**
 * How the groups of a matrix store their scales, and what a code stands for. A weight is scale · code +
 * offset.
 */
export interface ScalesRecord {
  readonly bits?: number;
  readonly offsets?: boolean;
  readonly superblock?: number;
  readonly table?: "iq4" | null;
}

/** How some rows of a matrix are stored, if its rows are not stored alike. */
export interface StoredRowsRecord {
  readonly n: number;
  readonly bits: number;
  readonly group_size: number;
  readonly scales?: ScalesRecord;
}

/**
 * How a matrix [n, k] is stored: `bits` in groups of `group_size` inputs, whose scales are stored as `scales`
 * says, or 16 or 32 for floats. With `pieces`, these say how the rows are stored, in order.
 */
export interface StoredMatrixRecord {
  readonly name: string;
  readonly n: number;
  readonly k: number;
  readonly bits: number;
  readonly group_size?: number;
  readonly reason?: string | null;
  readonly carried?: "exact" | "codes exact, offsets rounded" | "requantized" | null;
  readonly step?: number | null;
  readonly scales?: ScalesRecord;
  readonly pieces?: readonly StoredRowsRecord[];
}

/** How the weights were quantized: a summary, the method, and the facts of each matrix, which can differ. */
export interface QuantizationRecord {
  readonly scheme: string;
  readonly method?: string;
  readonly matrices?: readonly StoredMatrixRecord[];
}

/** A file of the artifact, with its size and SHA-256. */
export interface FileRecord {
  readonly file: string;
  readonly bytes: number;
  readonly sha256: string;
}

/** A tensor of the weight stream. */
export interface TensorRecord {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly offset: number;
  readonly bytes: number;
}

/**
 * The weights: a stream cut into shards; or safetensors files, whose headers describe the tensors; or data of
 * an ONNX graph, which describes them.
 */
export interface WeightsRecord {
  readonly bytes: number;
  readonly shard_bytes: number;
  readonly shards: readonly FileRecord[];
  readonly tensors: readonly TensorRecord[];
  readonly format?: "stream" | "safetensors" | "onnx";
}

/** A device buffer that plans name. `dtype` "kv" stands for the program's kv_dtype. */
export interface BufferRecord {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly (number | string)[];
}

/** The features and limits that a device must have to run a program. */
export interface RequiresRecord {
  readonly features: readonly string[];
  readonly limits?: Readonly<Record<string, number>>;
  readonly arch?: string | null;
  readonly system?: string | null;
}

/** Dtype and shape of a kernel argument (cpu). */
export interface KernelParamRecord {
  readonly dtype: string;
  readonly shape: readonly (number | string)[];
}

/**
 * A shader file with its entry point (webgpu; vulkan, with its workgroup size), or the params of a library
 * function (cpu).
 */
export interface KernelRecord {
  readonly file?: string | null;
  readonly entry?: string | null;
  readonly access?: readonly string[];
  readonly sha256?: string | null;
  readonly params?: readonly KernelParamRecord[];
  readonly workgroup?: readonly number[];
}

/**
 * One bucket of a function: `size` rows in, `rows` rows of logits. On mlx, which builds graphs, it has no
 * plan.
 */
export interface FunctionRecord {
  readonly size: number;
  readonly rows: number;
  readonly plan?: string | null;
  readonly sha256?: string | null;
}

/**
 * Kernels and plans. `activations`: dtype of the values between kernels, except the residual stream, which is
 * float32.
 */
export interface ProgramRecord {
  readonly name: string;
  readonly activations: "float16" | "float32";
  readonly kv_dtype: "float16" | "float32" | "int8" | "int4";
  readonly requires: RequiresRecord;
  readonly workspace: readonly number[];
  readonly kernels: Readonly<Record<string, KernelRecord>>;
  readonly functions: Readonly<Record<string, readonly FunctionRecord[]>>;
  readonly library?: string | null;
  readonly library_sha256?: string | null;
  readonly figures?: FileRecord | null;
  readonly device_class?: "software" | "mobile" | "integrated" | "discrete" | null;
}

/** TokenizerFiles(files: 'tuple[File, ...]') */
export interface TokenizerFilesRecord {
  readonly files: readonly FileRecord[];
}

/** A bundle file: several small files of `program`, or of the tokenizer, in one (format/bundle_files.py). */
export interface PackRecord {
  readonly file: string;
  readonly bytes: number;
  readonly sha256: string;
  readonly program?: string | null;
}

/** The strings around reasoning, such as <think> and </think>. */
export interface ReasoningMarksRecord {
  readonly begin: string;
  readonly end: string;
  readonly after?: string;
}

/** A call written as its name and then its arguments: `before` + name + `after` + arguments. */
export interface NamedRecord {
  readonly before?: string;
  readonly after?: string;
  readonly until?: string;
}

/**
 * Arguments that are not one JSON object: between `begin` and `end`, each as `before_name` + name +
 * `after_name` + value + `after_value`, with `separator` between them.
 */
export interface SpellingRecord {
  readonly begin: string;
  readonly end: string;
  readonly before_name?: string;
  readonly after_name?: string;
  readonly after_value?: string;
  readonly separator?: string;
  readonly quotes?: readonly string[];
  readonly raw?: boolean;
  readonly words?: readonly string[];
}

/** How calls are written: sections between `begin` and `end`, each with a call or a list of calls. */
export interface CallFormatRecord {
  readonly begin?: string;
  readonly end?: string;
  readonly also?: readonly string[];
  readonly bare?: string;
  readonly blank?: string;
  readonly separator?: string;
  readonly repeats?: boolean;
  readonly listed?: boolean;
  readonly name?: string;
  readonly arguments?: string;
  readonly named?: NamedRecord | null;
  readonly spelling?: SpellingRecord | null;
}

/** How a model marks the parts of its answers. `family`: the format's name, for people. */
export interface AnswerFormatRecord {
  readonly family?: string;
  readonly reasoning?: ReasoningMarksRecord | null;
  readonly calls?: CallFormatRecord | null;
  readonly text?: string;
  readonly dropped?: readonly string[];
}

/**
 * The content of the manifest's `sampling`; None: it states nothing. Names, ranges and meanings are those of
 * SamplingParams.
 */
export interface SamplingDefaultsRecord {
  readonly temperature?: number | null;
  readonly top_p?: number | null;
  readonly top_k?: number | null;
  readonly min_p?: number | null;
  readonly repetition_penalty?: number | null;
}

/** The content of manifest.json. */
export interface ManifestRecord {
  readonly format: string;
  readonly version: number;
  readonly target: string;
  readonly model: ModelRecord;
  readonly cache: CacheRecord;
  readonly groups: readonly GroupRecord[];
  readonly caches: readonly KvCacheRecord[];
  readonly ropes: Readonly<Record<string, RopeRecord>>;
  readonly step: StepRecord;
  readonly quantization: QuantizationRecord;
  readonly weights: WeightsRecord;
  readonly buffers: readonly BufferRecord[];
  readonly programs: readonly ProgramRecord[];
  readonly tokenizer: TokenizerFilesRecord;
  readonly config?: FileRecord | null;
  readonly function?: FileRecord | null;
  readonly packs?: readonly PackRecord[];
  readonly license?: string | null;
  readonly answers?: AnswerFormatRecord | null;
  readonly sampling?: SamplingDefaultsRecord;
  readonly provenance?: Readonly<Record<string, unknown>>;
}

/** One kernel launch of a plan; `grid` is empty on cpu. */
export interface LaunchRecord {
  readonly kernel: string;
  readonly args: readonly string[];
  readonly grid?: readonly number[];
}

/** A linear sequence of kernel launches. */
export interface PlanRecord {
  readonly function: string;
  readonly size: number;
  readonly rows: number;
  readonly launches: readonly LaunchRecord[];
}
