import { describe, expect, test } from "vitest";
import { DeviceError, RequestError } from "../src/protocol/errors.js";
import { checkedProfile, profileStep, type TimedBackend } from "../src/worker/engine/profile.js";
import { FakeBackend } from "./support/fake-backend.js";

/** A backend whose steps have two launches, of 1 and 3 ms. */
class Timed extends FakeBackend implements TimedBackend {
  constructor(private readonly tells = true) {
    super();
  }

  checkTimes(): void {
    if (!this.tells) throw new DeviceError("it does not tell");
  }

  async profile(name: "step", size: number): Promise<number[]> {
    this.run(name, size);
    return [1, 3];
  }

  launchesIn(): { kernel: string; weightBytes: number }[] {
    return ["first", "second"].map((kernel) => ({ kernel, weightBytes: 0 }));
  }
}

describe("the profile of a step", () => {
  test("has each launch with its share", async () => {
    const backend = new Timed();
    const checked = checkedProfile(backend, { rounds: 3 }, 256);
    expect(checked).toEqual({ rows: 1, context: 128, rounds: 3 });
    const { launches } = await profileStep(backend, checked);
    expect(launches.map(({ milliseconds, share }) => [milliseconds, share])).toEqual([
      [1, 0.25],
      [3, 0.75],
    ]);
  });

  test("is refused where the device does not tell, or a number cannot be", () => {
    expect(() => checkedProfile(new Timed(false), {}, 256)).toThrow(DeviceError);
    for (const options of [{ rows: 5 }, { context: 0 }, { context: 129 }, { rounds: 0 }])
      expect(() => checkedProfile(new Timed(), options, 256)).toThrow(RequestError);
  });

  test("is refused for a step that there was no memory for", () => {
    expect(checkedProfile(new Timed(), { rows: 4 }, 4).rows).toBe(4);
    const larger = (): unknown => checkedProfile(new Timed(), { rows: 16 }, 4);
    expect(larger).toThrow(RequestError);
    expect(larger).toThrow("rows must be one of 1, 4, not 16");
  });
});
