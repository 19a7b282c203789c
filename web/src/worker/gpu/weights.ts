import { allFrequencies, type TensorEntry } from "../../artifact/manifest.js";
import type { RemoteArtifact } from "../device/remote-artifact.js";
import { type ShardOptions, streamShards } from "../store/shards.js";
import type { BufferRegistry } from "./buffers.js";
import type { DeviceBuffer } from "./executor.js";
import { finished } from "./staging.js";

/** Allocates the buffers of all tensors, by name, without contents. */
export function allocateWeights(
  buffers: BufferRegistry,
  { manifest }: RemoteArtifact,
): Promise<Map<string, DeviceBuffer>> {
  const { tensors, bytes } = manifest.weights;
  const advice =
    `The weights alone need ${bytes} bytes. ` + "Close other tabs, or use a smaller or more quantized model.";
  return buffers.guarded("the weights", advice, () => {
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST;
    const make = ({ name, bytes: size, dtype }: TensorEntry): [string, DeviceBuffer] => [
      name,
      { gpu: buffers.create(name, size, usage), dtype },
    ];
    return new Map(tensors.map(make));
  });
}

/**
 * Uploads the shards into the tensors' buffers one by one; returns the tensors that the host needs itself, by
 * name.
 */
export async function streamWeights(
  { base, manifest }: RemoteArtifact,
  weights: ReadonlyMap<string, DeviceBuffer>,
  device: GPUDevice,
  options: ShardOptions,
): Promise<Map<string, Float32Array>> {
  const { shards, shardBytes, tensors } = manifest.weights;
  const wanted = new Set([...manifest.ropes.values()].flatMap(allFrequencies));
  const onHost = new Map(
    tensors.filter(({ name }) => wanted.has(name)).map(({ name, bytes }) => [name, new Uint8Array(bytes)]),
  );
  let start = 0;
  for await (const shard of streamShards(base, shards, options)) {
    for (const { tensor, part, at } of partsIn(tensors, start, shard)) {
      const target = weights.get(tensor.name);
      if (target) device.queue.writeBuffer(target.gpu, at, padded(part));
      onHost.get(tensor.name)?.set(part, at);
    }
    // Each shard is awaited, because otherwise the queue would hold a copy of every shard at once.
    await finished(device);
    start += shardBytes;
  }
  return new Map([...onHost].map(([name, { buffer }]) => [name, new Float32Array(buffer)]));
}

interface TensorPart {
  readonly tensor: TensorEntry;
  readonly part: Uint8Array<ArrayBuffer>;
  /** The byte of the tensor at which the part starts. */
  readonly at: number;
}

/** The parts of tensors in `shard`, whose first byte is byte `start` of the stream. */
export function* partsIn(
  tensors: readonly TensorEntry[],
  start: number,
  shard: Uint8Array<ArrayBuffer>,
): Generator<TensorPart> {
  const end = start + shard.length;
  for (const tensor of tensors) {
    const from = Math.max(tensor.offset, start);
    const to = Math.min(tensor.offset + tensor.bytes, end);
    if (from < to) yield { tensor, part: shard.subarray(from - start, to - start), at: from - tensor.offset };
  }
}

/** writeBuffer takes multiples of 4 bytes; the last part of a float16 tensor may have 2 more. */
function padded(part: Uint8Array<ArrayBuffer>): Uint8Array<ArrayBuffer> {
  if (part.length % 4 === 0) return part;
  const whole = new Uint8Array(Math.ceil(part.length / 4) * 4);
  whole.set(part);
  return whole;
}
