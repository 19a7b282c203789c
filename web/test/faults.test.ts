import { beforeEach, describe, expect, test, vi } from "vitest";
import type { FunctionName } from "../src/artifact/manifest.js";
import { BufferRegistry } from "../src/worker/gpu/buffers.js";
import { Executor } from "../src/worker/gpu/executor.js";
import { Faults } from "../src/worker/gpu/faults.js";
import { Pipelines } from "../src/worker/gpu/pipelines.js";

/** A WebGPU device that only reports its own loss and errors. */
class SpokenDevice extends EventTarget {
  lose: (info: { reason: string; message: string }) => void = () => undefined;
  readonly lost = new Promise((resolve) => {
    this.lose = resolve;
  });
  ears = 0;

  override addEventListener(...given: Parameters<EventTarget["addEventListener"]>): void {
    this.ears += 1;
    super.addEventListener(...given);
  }

  destroy(): void {}
}

describe("what a device says of itself", () => {
  let device: SpokenDevice;
  let faults: Faults;
  let buffers: BufferRegistry;
  beforeEach(() => {
    vi.stubGlobal("GPUOutOfMemoryError", class {});
    device = new SpokenDevice();
    buffers = new BufferRegistry(device as unknown as GPUDevice);
    faults = new Faults(buffers);
    return () => vi.unstubAllGlobals();
  });

  const executor = (): Executor => {
    const plans = { step: new Map(), greedy: new Map(), sample: new Map(), logprobs: new Map() };
    return new Executor({
      buffers: buffers.part(),
      faults,
      pipelines: new Pipelines(buffers.device, new Map()),
      shape: { groups: [], pageSize: 1, slots: 1, pagesPerSlot: 1, contextLength: 1, vocabSize: 1 },
      plans: plans satisfies Record<FunctionName, object>,
      weights: new Map(),
      named: new Map(),
      workspace: [],
      cache: [],
    });
  };

  const say = (message: string): void => {
    device.dispatchEvent(Object.assign(new Event("uncapturederror"), { error: { message } }));
  };

  test("is heard by the executors in use, and by none that others have followed", async () => {
    const [first, second] = [executor(), executor()];
    expect([device.ears, faults.listeners]).toEqual([1, 2]);
    first.retire();
    expect(faults.listeners).toBe(1);
    say("out of bounds");
    await expect(first.fetch([])).rejects.toThrow("Another executor has taken this one's place.");
    await expect(second.fetch([])).rejects.toThrow("out of bounds");
    second.dispose();
    expect([device.ears, faults.listeners]).toEqual([1, 0]);
  });

  test("is nothing to an executor that comes later, except for a loss", async () => {
    const before = executor();
    say("out of bounds");
    const after = executor();
    device.lose({ reason: "unknown", message: "gone" });
    await device.lost;
    await expect(after.fetch([])).rejects.toThrow("The GPU device was lost (unknown: gone)");
    await expect(before.fetch([])).rejects.toThrow("out of bounds");
    await expect(executor().fetch([])).rejects.toThrow("The GPU device was lost");
    expect(faults.listeners).toBe(0);
  });
});
