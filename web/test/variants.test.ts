import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import type { DeviceClass } from "../src/both/manifest.js";
import { describe as describeAdapter } from "../src/worker/gpu/device.js";
import { type Adapter, classOf, lineUp } from "../src/worker/gpu/variants.js";

/** The scripts that Python replays too: tests/vectors/variants/README.md says what each key means. */
const VECTORS = new URL("../../tests/vectors/variants/", import.meta.url);

interface Finalists {
  readonly able: readonly string[];
  readonly class: DeviceClass;
  readonly lost: readonly string[];
  readonly finalists: readonly string[];
}

const classes = read<readonly (Adapter & { readonly class: DeviceClass })[]>("classes.json");
const { finalists } = read<{ readonly finalists: readonly Finalists[] }>("choices.json");

describe("variants", () => {
  test.each(classes)(
    "an adapter $vendor $name $kind has the class $class",
    ({ class: expected, ...adapter }) => {
      expect(classOf(adapter)).toBe(expected);
    },
  );

  test.each(finalists)("of $able, $class has $finalists", ({ able, class: deviceClass, lost, finalists }) => {
    const programs = able.map((name) => ({ name, deviceClass: name.split("-")[0] as DeviceClass }));
    expect(lineUp(programs, deviceClass, lost).map(({ name }) => name)).toEqual(finalists);
  });

  test("a browser tells a phone by its own name, and an adapter in software by a flag", () => {
    const info = {
      vendor: "apple",
      architecture: "metal-3",
      device: "",
      description: "",
      isFallbackAdapter: false,
    };
    const told = (given: object, agent: string) =>
      classOf(describeAdapter({ ...info, ...given } as GPUAdapterInfo, agent));
    expect(told({}, "Mozilla/5.0 (iPhone; CPU iPhone OS 26_0 like Mac OS X)")).toBe("mobile");
    expect(told({}, "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7)")).toBe("integrated");
    expect(told({ isFallbackAdapter: true }, "Mozilla/5.0 (X11; Linux x86_64)")).toBe("software");
  });
});

function read<T>(name: string): T {
  return JSON.parse(readFileSync(new URL(name, VECTORS), "utf8")) as T;
}
