import { embeddingOf } from "../../artifact/buffers.js";
import { frequenciesOf, type Manifest } from "../../artifact/manifest.js";
import type { Backend, BackendShape } from "../engine/backend.js";
import type { MemoryPlan } from "./memory.js";
import { ropeTable } from "./rope.js";

/** The shape of a device, for the engine, with memory as in `plan`. */
export function shapeOf(
  { model, cache, groups, buffers }: Pick<Manifest, "model" | "cache" | "groups" | "buffers">,
  plan: MemoryPlan,
): BackendShape {
  return {
    groups: groups.map(({ window }, group) => ({ window, pages: plan.pages[group] ?? 0 })),
    pageSize: cache.pageSize,
    slots: cache.slots,
    pagesPerSlot: Math.ceil(model.contextLength / cache.pageSize),
    contextLength: plan.contextLength,
    vocabSize: model.vocabSize,
    embedding: embeddingOf({ model, buffers }),
  };
}

/**
 * Writes the initial values that are not zero: rotations, from each rope's float32 frequencies that `tensor`
 * returns, and the masks that allow every token (one bit a token, for each slot).
 */
export function initialize(
  backend: Backend,
  { ropes }: Pick<Manifest, "ropes">,
  tensor: (name: string) => Float32Array,
): void {
  const { contextLength, slots, vocabSize, embedding } = backend.shape;
  for (const [name, rope] of ropes) {
    const frequencies = tensor(frequenciesOf(rope, contextLength));
    backend.write(`rope.${name}`, ropeTable(frequencies, rope.scale, contextLength));
  }
  const words = Math.ceil(vocabSize / 32);
  if (!embedding) backend.write("allowed", new Uint32Array(slots * words).fill(0xffffffff));
}
