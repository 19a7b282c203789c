import { FORMAT, VERSION } from "../../src/format/constants.js";
import { buffersFor } from "./buffers.js";

/** A small manifest as a build writes it; tests change the fields that they need. */
export function sampleManifest() {
  const described = {
    format: FORMAT as string,
    version: VERSION as number,
    target: "webgpu",
    model: {
      name: "sample",
      architecture: "llama",
      vocab_size: 97,
      context_length: 100,
      bos_token_id: 0 as number | null,
      eos_token_ids: [1],
    },
    cache: { page_size: 16, slots: 4 },
    groups: [{ window: null as number | null }],
    caches: [{ kv_heads: 1, head_dim: 4, group: 0 }],
    ropes: { base: { inv_freq: "rope.base.inv_freq", scale: 1.0 } } as Record<
      string,
      { inv_freq: string; scale: number }
    >,
    step: { ops: [], params: [] },
    quantization: { scheme: "q4", method: "none", matrices: [] },
    weights: {
      bytes: 1024,
      shard_bytes: 512,
      shards: [
        { file: "weights/00000.bin", bytes: 512, sha256: "a".repeat(64) },
        { file: "weights/00001.bin", bytes: 512, sha256: "b".repeat(64) },
      ],
      tensors: [
        { name: "rope.base.inv_freq", dtype: "float32", shape: [2], offset: 0, bytes: 8 },
        { name: "embed.codes", dtype: "uint32", shape: [8, 24], offset: 256, bytes: 768 },
      ],
    },
    programs: [program("f16", ["shader-f16"]), program("f32", [])],
    tokenizer: { files: [{ file: "tokenizer/tokenizer.json", bytes: 1, sha256: "c".repeat(64) }] },
    license: "mit",
    provenance: {},
  };
  return { ...described, buffers: buffersFor(described) };
}

function program(name: string, features: string[]) {
  const bucket = (of: string, size: number) => {
    return { size, rows: size, plan: `plans/${name}/${of}.${size}.json`, sha256: "e".repeat(64) };
  };
  return {
    name,
    activations: name === "f16" ? "float16" : "float32",
    kv_dtype: name === "f16" ? "float16" : "float32",
    requires: {
      features,
      limits: { maxStorageBuffersPerShaderStage: 8, maxComputeInvocationsPerWorkgroup: 256 },
    },
    workspace: [4096],
    library: null,
    kernels: {
      k: {
        file: `kernels/${name}/k.wgsl`,
        entry: "k_kernel",
        access: ["read", "read_write"],
        sha256: "d".repeat(64),
      },
    },
    functions: {
      step: [bucket("step", 1), bucket("step", 4)],
      greedy: [bucket("greedy", 1)],
      sample: [bucket("sample", 1)],
      logprobs: [bucket("logprobs", 1)],
    },
  };
}
