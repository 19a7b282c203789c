import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import type { DeviceClass } from "../src/protocol/backends.js";
import { type Adapter, classOf, describe as describeAdapter } from "../src/worker/gpu/adapter.js";
import { known } from "../src/worker/gpu/opening.js";
import { compare, lineUp, type StepKind } from "../src/worker/gpu/variants.js";
import { Kept } from "../src/worker/store/kept.js";

/** The scripts that Python replays too: tests/vectors/variants/README.md says what each key means. */
const VECTORS = new URL("../../tests/vectors/variants/", import.meta.url);

interface Finalists {
  readonly able: readonly string[];
  readonly class: DeviceClass;
  readonly lost: readonly string[];
  readonly finalists: readonly string[];
}

interface Trial extends Readonly<Record<StepKind, Readonly<Record<string, readonly number[]>>>> {
  readonly steps: number;
  readonly asked?: readonly string[];
  readonly program: string;
  readonly why: string;
}

interface Known {
  readonly finalists: readonly string[];
  readonly kept: { readonly lost: readonly string[]; readonly chosen: Readonly<Record<string, string>> };
  readonly busy: boolean;
  readonly failed: readonly string[];
  readonly program: string | null;
  readonly why: string | null;
}

const classes = read<readonly (Adapter & { readonly class: DeviceClass })[]>("classes.json");
const choices = read<{
  readonly finalists: readonly Finalists[];
  readonly trials: readonly Trial[];
  readonly known: readonly Known[];
}>("choices.json");

describe("variants", () => {
  test.each(classes)(
    "an adapter $vendor $name $kind has the class $class",
    ({ class: expected, ...adapter }) => {
      expect(classOf(adapter)).toBe(expected);
    },
  );

  test.each(choices.finalists)(
    "of $able, $class has $finalists",
    ({ able, class: deviceClass, lost, finalists }) => {
      const programs = able.map((name) => ({ name, deviceClass: name.split("-")[0] as DeviceClass }));
      expect(lineUp(programs, deviceClass, lost).map(({ name }) => name)).toEqual(finalists);
    },
  );

  test.each(choices.trials)("of decode steps $decode $program is chosen: $why", async (trial) => {
    const asked: string[] = [];
    const choice = await compare(Object.keys(trial.decode), async (name, kind) => {
      const times = trial[kind][name] ?? [];
      const before = asked.filter((step) => step === `${name} ${kind}`).length;
      asked.push(`${name} ${kind}`);
      return times[Math.min(before, times.length - 1)] ?? 0;
    });
    expect([choice.program, choice.why, asked.length]).toEqual([trial.program, trial.why, trial.steps]);
    expect(asked).toEqual(trial.asked ?? asked);
  });

  test.each(choices.known)("of $finalists, with $kept, it is $program: $why", async (given) => {
    const trying = given.busy ? { program: "z", load: "another" } : null;
    const text = JSON.stringify({ ...given.kept, trying });
    const file = { read: async () => text, write: async () => undefined };
    const kept = await Kept.open(file, { busy: given.busy, load: "this", hasLeft: async () => false });
    const choice = known(given.finalists, kept, new Set(given.failed));
    expect([choice?.program ?? null, choice?.why ?? null]).toEqual([given.program, given.why]);
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
