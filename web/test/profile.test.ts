import { describe, expect, test } from "vitest";
import type { BufferName } from "../src/format/constants.js";
import { DeviceError, RequestError } from "../src/protocol/errors.js";
import type { HostArray } from "../src/worker/engine/backend.js";
import { checkedProfile, profileStep, type TimedBackend } from "../src/worker/engine/profile.js";
import { FakeBackend } from "./support/fake-backend.js";

/** A backend whose steps have two launches, of 1 and 3 ms. */
class Timed extends FakeBackend implements TimedBackend {
  readonly tables = new Map<string, HostArray>();

  constructor(
    private readonly tells = true,
    ...shape: ConstructorParameters<typeof FakeBackend>
  ) {
    super(...shape);
  }

  override write(buffer: BufferName, data: HostArray, offset = 0): void {
    if (buffer.startsWith("page_table.")) this.tables.set(buffer, data);
    super.write(buffer, data, offset);
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

  test("takes the context that the cache allows, whose groups with windows have few pages", async () => {
    const backend = new Timed(true, { windows: [null, 8], pages: [32, 3] });
    const checked = checkedProfile(backend, { rounds: 1 }, 256);
    expect(checked.context).toBe(128);
    await profileStep(backend, checked);
    expect(backend.tables.get("page_table.0")).toEqual(Int32Array.from({ length: 32 }, (_, page) => page));
    const used = Array.from({ length: 32 }, (_, column) => column % 3);
    expect(backend.tables.get("page_table.1")).toEqual(Int32Array.from(used));
    // A step of four rows needs a page more: the group then counts as one without a window.
    expect(checkedProfile(backend, { rows: 4 }, 256).context).toBe(12);
    const states = { ...backend.shape, groups: [{ window: 2, stride: 32, pages: 3 }] };
    expect(checkedProfile(Object.assign(new Timed(), { shape: states }), {}, 256).context).toBe(128);
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
