import { BUFFERS, OF_LOGITS } from "../format/constants.js";
import type { BufferEntry, CacheInfo, Dim, Manifest } from "./manifest.js";

/**
 * The buffers of an artifact: the format's table, with the sizes of the model and its caches from the
 * manifest.
 */

/** The numbers for the words in a shape. */
type Words = Readonly<Record<string, Dim>>;

/** The facts of a manifest that decide the buffers. */
export interface BufferFacts extends Pick<Manifest, "cache" | "groups" | "caches" | "ropes"> {
  readonly model: Pick<Manifest["model"], "vocabSize" | "contextLength"> &
    Partial<Pick<Manifest["model"], "task">>;
  readonly buffers?: readonly BufferEntry[];
  readonly weights: Pick<Manifest["weights"], "tensors">;
}

/** Every buffer that the plans of an artifact can name. */
export function buffersOf(manifest: BufferFacts): BufferEntry[] {
  const { model, cache } = manifest;
  const words: Words = {
    slots: cache.slots,
    pages_per_slot: Math.ceil(model.contextLength / cache.pageSize),
    vocab: model.vocabSize,
    vocab_words: Math.ceil(model.vocabSize / 32),
    page_size: cache.pageSize,
    // The width of a step is not known here; plans write whole rows.
    embedding: embeddingOf(manifest),
  };
  const leftOut: readonly string[] = model.task === "embed" ? OF_LOGITS : ["embedding"];
  return Object.entries(BUFFERS).flatMap(([line, { dtype, shape }]) =>
    (leftOut.includes(line) ? [] : instances(line, manifest)).map(([name, more]): BufferEntry => {
      const all: Words = { ...words, ...more };
      return { name, dtype, shape: shape.map((dim) => all[dim] ?? (dim as Dim)) };
    }),
  );
}

/** The number of values of an embedding; 0 for a model that gives logits. */
export function embeddingOf({ model, buffers }: Pick<BufferFacts, "model" | "buffers">): number {
  if (model.task !== "embed") return 0;
  const width = buffers?.find(({ name }) => name === "embedding")?.shape[1];
  return typeof width === "number" ? width : 0;
}

/** The buffers for which a line of the table stands, each with the numbers that its shape depends on. */
function instances(line: string, { groups, caches, ropes, weights }: BufferFacts): [string, Words][] {
  if (line.includes("<g>")) return groups.map((_, group) => [line.replace("<g>", `${group}`), {}]);
  if (line.includes("<c>"))
    return caches.flatMap((cache, i): [string, Words][] =>
      LINES[cache.parts].includes(line) ? [[line.replace("<c>", `${i}`), wordsOf(cache)]] : [],
    );
  if (!line.includes("<name>")) return [[line, {}]];
  const frequencies = (tensor: string): number =>
    weights.tensors.find(({ name }) => name === tensor)?.shape[0] ?? 0;
  return [...ropes].map(([name, rope]) => [
    line.replace("<name>", name),
    { head_dim: 2 * frequencies(rope.invFreq) },
  ]);
}

/** The lines of a cache by what it keeps. */
const LINES: Readonly<Record<CacheInfo["parts"], readonly string[]>> = {
  kv: ["kv.<c>.k", "kv.<c>.v"],
  k: ["kv.<c>.x"],
  state: ["kv.<c>.s"],
};

function wordsOf({ kvHeads, headDim, group, depth }: CacheInfo): Words {
  return { "pages.<g>": `pages.${group}`, kv_heads: kvHeads, head_dim: headDim, depth };
}
