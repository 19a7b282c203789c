import fc from "fast-check";
import { describe, expect, test } from "vitest";
import type { Program } from "../../src/artifact/manifest.js";
import { openManifest, parseManifest } from "../../src/artifact/reader.js";
import { ArtifactError } from "../../src/protocol/errors.js";
import { within } from "../../src/storage/http.js";
import { type Plan, parsePlan, planNames } from "../../src/worker/device/plan.js";
import { streamShards } from "../../src/worker/store/shards.js";
import { sampleManifest } from "../support/manifest.js";
import { seal } from "../support/seal.js";
import { toyArtifact } from "../support/toy-artifact.js";
import { effort } from "./effort.js";

/** Values with which a hostile or damaged file replaces a valid one. */
const strange = fc.oneof(
  fc.constantFrom(
    null,
    true,
    "",
    "a",
    0,
    -1,
    1.5,
    1e308,
    2 ** 53,
    "..",
    "weights/00000.bin",
    "rope.inv_freq",
  ),
  fc.jsonValue({ maxDepth: 3 }),
);

type Json = { [key: string]: unknown };

/** Every place of a JSON value, as a path. */
function placesOf(value: unknown, path: readonly string[] = []): (readonly string[])[] {
  if (typeof value !== "object" || value === null) return [path];
  return [path, ...Object.entries(value).flatMap(([key, item]) => placesOf(item, [...path, key]))];
}

/** A copy with another value at a place; undefined removes it. */
function changed(value: unknown, [key, ...rest]: readonly string[], to: unknown): unknown {
  if (key === undefined) return to;
  if (Array.isArray(value))
    return value.map((item, i) => (String(i) === key ? changed(item, rest, to) : item));
  const { [key]: old, ...others } = value as Json;
  const item = changed(old, rest, to);
  return item === undefined ? others : { ...others, [key]: item };
}

/** The result of a call, or null for an ArtifactError; other errors fail the test. */
function orRefused<T>(read: () => T): T | null {
  try {
    return read();
  } catch (error) {
    if (error instanceof ArtifactError) return null;
    throw error;
  }
}

const change = (value: object): fc.Arbitrary<unknown> =>
  fc
    .array(fc.tuple(fc.constantFrom(...placesOf(value)), fc.oneof(strange, fc.constant(undefined))), {
      minLength: 1,
      maxLength: 3,
    })
    .map((changes) =>
      changes.reduce<unknown>((made, [place, to]) => {
        try {
          return changed(made, place, to);
        } catch {
          return made; // an earlier change has taken the place away
        }
      }, value),
    );

describe("what an artifact's files may say", () => {
  test("a manifest is read or refused, and what is read adds up", () => {
    fc.assert(
      fc.property(change(sampleManifest()), (document) => {
        const manifest = orRefused(() => parseManifest(JSON.stringify(document) ?? ""));
        if (!manifest) return;
        const { weights, model, programs } = manifest;
        expect(weights.shards.reduce((sum, { bytes }) => sum + bytes, 0)).toBe(weights.bytes);
        for (const { offset, bytes } of weights.tensors)
          expect(offset + bytes).toBeLessThanOrEqual(weights.bytes);
        for (const token of model.eosTokenIds) expect(token).toBeLessThan(model.vocabSize);
        for (const { functions } of programs)
          expect(functions.step.length * functions.greedy.length).toBeGreaterThan(0);
      }),
      effort(2000),
    );
  });

  test("any text is a manifest or refused", () => {
    fc.assert(
      fc.property(fc.oneof(fc.string(), fc.json()), (text) => {
        expect(orRefused(() => parseManifest(text))).toBeNull();
      }),
      effort(500),
    );
  });

  test("one changed character of a manifest is seen", async () => {
    const text = seal(sampleManifest());
    await fc.assert(
      fc.asyncProperty(
        fc.nat(text.length - 1),
        fc.string({ unit: "grapheme-ascii", minLength: 1, maxLength: 1 }),
        async (at, other) => {
          fc.pre(text[at] !== other);
          await expect(openManifest(text.slice(0, at) + other + text.slice(at + 1))).rejects.toThrow(
            ArtifactError,
          );
        },
      ),
      effort(500),
    );
  });

  test("a plan is read or refused, and launches only what the manifest lists", () => {
    const manifest = parseManifest(JSON.stringify(sampleManifest()));
    const program = manifest.programs[0] as Program;
    const names = planNames(manifest, program);
    const launch = { kernel: "k", grid: [7, 1, 1], args: ["weight:embed.codes", "workspace:0"] };
    const plan = { function: "step", size: 4, rows: 4, launches: [launch, launch] };
    const bucket = { size: 4, rows: 4, plan: "step.4.json", sha256: "" };
    const read = (text: string): Plan | null => orRefused(() => parsePlan(text, "step", bucket, names));
    expect(read(JSON.stringify(plan))).not.toBeNull();
    fc.assert(
      fc.property(change(plan), (document) => {
        for (const { kernel, args, grid } of read(JSON.stringify(document) ?? "")?.launches ?? []) {
          expect(names.kernels.has(kernel)).toBe(true);
          for (const { space, name } of args) expect(names.args.has(`${space}:${name}`)).toBe(true);
          expect(grid.every((extent) => Number.isSafeInteger(extent) && extent > 0)).toBe(true);
        }
      }),
      effort(2000),
    );
  });

  test("no name leads out of the artifact", () => {
    const base = new URL("https://host/models/a/");
    const piece = fc.constantFrom(
      "..",
      ".",
      "/",
      "\\",
      "%2e",
      "%2F",
      "\t",
      "\n",
      ":",
      "a",
      "?",
      "#",
      "//",
      "@",
      "https:",
      " ",
    );
    fc.assert(
      fc.property(fc.array(piece, { maxLength: 8 }), (pieces) => {
        const file = pieces.join("");
        let url: URL | null = null;
        try {
          url = orRefused(() => within(base, file));
        } catch (error) {
          expect(error).toBeInstanceOf(TypeError); // no URL at all
        }
        if (url) expect(url.href.startsWith(base.href)).toBe(true);
      }),
      effort(2000),
    );
  });

  test("a shard arrives as the manifest says, or the load fails", async () => {
    const { files } = toyArtifact();
    const text = new TextDecoder().decode(files.get("manifest.json"));
    const { shards } = parseManifest(text).weights;
    const first = files.get(shards[0]?.file ?? "") ?? new Uint8Array();
    const body = fc.oneof(
      fc.uint8Array({ maxLength: 2 * first.length }),
      fc.nat(first.length - 1).map((at) => first.map((byte, i) => (i === at ? byte ^ 1 : byte))),
      fc.nat(first.length - 1).map((length) => first.slice(0, length)),
    );
    await fc.assert(
      fc.asyncProperty(body, async (bytes) => {
        const fetch = async (): Promise<Response> => new Response(new Uint8Array(bytes));
        const shard = streamShards(new URL("https://host/a/"), shards, { cache: null, fetch }).next();
        await expect(shard).rejects.toThrow(ArtifactError);
      }),
      effort(50),
    );
  });
});
