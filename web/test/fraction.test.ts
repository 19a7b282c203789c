import { describe, expect, test } from "vitest";
import type { LoadStep } from "../src/protocol/messages.js";
import { LoadFraction } from "../src/worker/loading/fraction.js";

describe("the fraction of a load", () => {
  const weights = (loaded: number): LoadStep => ({ phase: "weights", loaded, cached: 0, total: 100 });
  const kernels = (compiled: number, total = 10): LoadStep => ({ phase: "kernels", compiled, total });
  const told = (...steps: LoadStep[]): (number | undefined)[] => {
    const fraction = new LoadFraction();
    return steps.map((step) => fraction.after(step));
  };

  test("ends at ready and no sooner, and is left out afterwards", () => {
    const [start, all, ready, later] = told(weights(0), weights(100), { phase: "ready" }, kernels(1));
    expect([start, ready, later]).toEqual([0, 1, undefined]);
    expect(all).toBeLessThan(1);
    expect(told(weights(100), kernels(10))[1]).toBeLessThan(1);
  });

  test("what is here is not done until it is on the device", () => {
    const step = { phase: "weights", loaded: 100, cached: 0, total: 100 } as const;
    const [here, verified, there] = told(
      { ...step, verified: 0, uploaded: 0 },
      { ...step, verified: 100 },
      {
        ...step,
        ...{ verified: 100, uploaded: 100 },
      },
    );
    expect(there).toBeGreaterThan(verified ?? 1);
    expect(verified).toBe(here);
  });

  test("never goes back: another program's kernels, or the weights once more", () => {
    const seen = told(kernels(9), weights(50), kernels(0, 99), weights(0), weights(60), kernels(99, 99));
    expect(seen).toEqual([...seen].sort((a, b) => (a ?? 1) - (b ?? 1)));
    expect(new Set(seen).size).toBe(3);
  });
});
