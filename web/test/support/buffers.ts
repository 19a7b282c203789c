import { buffersOf } from "../../src/artifact/buffers.js";
import type { BufferEntry, TensorEntry } from "../../src/artifact/manifest.js";

/** The facts of a manifest that decide the buffers, as its JSON has them. */
export interface BufferFacts {
  readonly model: { readonly vocab_size: number; readonly context_length: number };
  readonly cache: { readonly page_size: number; readonly slots: number };
  readonly groups: readonly { readonly window?: number | null; readonly stride?: number | null }[];
  readonly caches: readonly {
    readonly kv_heads: number;
    readonly head_dim: number;
    readonly group: number;
    readonly parts?: "kv" | "k" | "state";
    readonly depth?: number;
  }[];
  readonly ropes: Readonly<Record<string, { readonly inv_freq: string; readonly scale: number }>>;
  readonly weights: { readonly tensors: readonly object[] };
}

/** The buffers that a manifest must list; tests/vectors/format has Python's list for one manifest. */
export function buffersFor({ model, cache, groups, caches, ropes, weights }: BufferFacts): BufferEntry[] {
  return buffersOf({
    model: { vocabSize: model.vocab_size, contextLength: model.context_length },
    cache: { pageSize: cache.page_size, slots: cache.slots },
    groups: groups.map(({ window, stride }) => ({ window: window ?? null, stride: stride ?? null })),
    caches: caches.map(({ kv_heads, head_dim, group, parts, depth }) => ({
      kvHeads: kv_heads,
      headDim: head_dim,
      group,
      parts: parts ?? "kv",
      depth: depth ?? 0,
    })),
    ropes: new Map(
      Object.entries(ropes).map(([name, { inv_freq, scale }]) => [
        name,
        { invFreq: inv_freq, scale, short: null },
      ]),
    ),
    weights: { tensors: weights.tensors as readonly TensorEntry[] },
  });
}
