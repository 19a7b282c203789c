import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { parseManifest } from "../src/artifact/reader.js";

/** Manifests that Python rejects too (tests/unit/test_consistency_vectors.py). */
const VECTORS = new URL("../../tests/vectors/format/consistency.json", import.meta.url);

interface Vectors {
  readonly manifest: unknown;
  readonly cases: readonly Case[];
}

/** A value that replaces another in the manifest. `names`: words that the error must contain. */
interface Case {
  readonly name: string;
  readonly at: readonly (string | number)[];
  readonly value: unknown;
  readonly names: readonly string[];
}

const { manifest, cases } = JSON.parse(readFileSync(VECTORS, "utf8")) as Vectors;

function changed({ at, value }: Case): unknown {
  const made = structuredClone(manifest);
  let place = made as Record<string | number, unknown>;
  for (const key of at.slice(0, -1)) place = place[key] as Record<string | number, unknown>;
  place[at.at(-1) ?? ""] = value;
  return made;
}

describe("a manifest is refused, as in Python, for", () => {
  test("nothing where it adds up", () => {
    expect(() => parseManifest(JSON.stringify(manifest))).not.toThrow();
  });

  test.each(cases.map((one) => [one.name, one] as const))("%s", (_, one) => {
    let said = "";
    try {
      parseManifest(JSON.stringify(changed(one)));
    } catch (error) {
      said = String(error);
    }
    for (const name of one.names) expect(said).toContain(name);
  });
});
