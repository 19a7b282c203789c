/** A small manifest as a build writes it; tests change what they are about. */
export function sampleManifest() {
  return {
    format: "nearfar-artifact",
    version: 2,
    target: "webgpu",
    model: {
      name: "sample",
      architecture: "llama",
      hidden_size: 8,
      layers: 1,
      heads: 2,
      kv_heads: 1,
      head_dim: 4,
      vocab_size: 97,
      context_length: 100,
      bos_token_id: 0 as number | null,
      eos_token_ids: [1],
    },
    cache: { page_size: 16, slots: 4 },
    rope: { inv_freq: "rope.inv_freq", scale: 1.0 },
    quantization: { scheme: "q4", bits: 4, group_size: 32, method: "", quantized: [], dense: [] },
    weights: {
      bytes: 1024,
      shard_bytes: 512,
      shards: [
        { file: "weights/00000.bin", bytes: 512, sha256: "a".repeat(64) },
        { file: "weights/00001.bin", bytes: 512, sha256: "b".repeat(64) },
      ],
      tensors: [
        { name: "rope.inv_freq", dtype: "float32", shape: [2], offset: 0, bytes: 8 },
        { name: "embed.codes", dtype: "uint32", shape: [8, 24], offset: 256, bytes: 768 },
      ],
    },
    buffers: [
      { name: "tokens", dtype: "int32", shape: [256] as (number | string)[] },
      { name: "rope", dtype: "float32", shape: ["context", 4] },
      { name: "kv.0.k", dtype: "kv", shape: ["pages", 1, 16, 4] },
      { name: "kv.0.v", dtype: "kv", shape: ["pages", 1, 16, 4] },
    ],
    programs: [program("f16", ["shader-f16"]), program("f32", [])],
    memory: { weights: 1024, kv_bytes_per_token: { f16: 16, f32: 32 } },
    tokenizer: { files: [{ file: "tokenizer/tokenizer.json", bytes: 1, sha256: "c".repeat(64) }] },
    license: "mit",
    provenance: {},
  };
}

function program(precision: string, features: string[]) {
  return {
    precision,
    kv_dtype: precision === "f16" ? "float16" : "float32",
    requires: { features, limits: { maxStorageBuffersPerShaderStage: 8, maxComputeInvocationsPerWorkgroup: 256 } },
    workspace: [4096],
    library: null,
    kernels: {
      k: {
        file: `kernels/${precision}/k.wgsl`,
        entry: "k_kernel",
        access: ["read", "read_write"],
        sha256: "d".repeat(64),
      },
    },
    functions: {
      step: [
        { size: 4, rows: 4, plan: `plans/${precision}/step.4.json`, sha256: "e".repeat(64) },
        { size: 1, rows: 1, plan: `plans/${precision}/step.1.json`, sha256: "e".repeat(64) },
      ],
      greedy: [{ size: 1, rows: 1, plan: `plans/${precision}/greedy.1.json`, sha256: "e".repeat(64) }],
    },
  };
}
