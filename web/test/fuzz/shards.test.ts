import { createHash } from "node:crypto";
import fc from "fast-check";
import { expect, test } from "vitest";
import type { FileEntry } from "../../src/artifact/manifest.js";
import { ArtifactError } from "../../src/protocol/errors.js";
import type { FileCache } from "../../src/storage/file-cache.js";
import { streamShards } from "../../src/worker/store/shards.js";
import { effort } from "./effort.js";

const CONTENTS = [1, 2, 3].map((salt) => Uint8Array.from({ length: 64 }, (_, i) => (i * salt) % 256));
const SHARDS: FileEntry[] = CONTENTS.map((bytes, i) => ({
  file: `weights/${i}.bin`,
  bytes: bytes.length,
  sha256: createHash("sha256").update(bytes).digest("hex"),
}));

/** Bytes that are the shard, nearly the shard, or anything; null: none. */
const bytesLike = (shard: Uint8Array): fc.Arbitrary<Uint8Array<ArrayBuffer> | null> =>
  fc.oneof(
    { weight: 3, arbitrary: fc.constant(Uint8Array.from(shard)) },
    fc.constant(null),
    fc.uint8Array({ maxLength: 80 }).map((bytes) => Uint8Array.from(bytes)),
    fc.nat(63).map((end) => Uint8Array.from(shard.subarray(0, end))),
    fc.tuple(fc.nat(63), fc.integer({ min: 1, max: 255 })).map(([at, flip]) => {
      const bytes = Uint8Array.from(shard);
      bytes[at] = (bytes[at] ?? 0) ^ flip;
      return bytes;
    }),
  );
const one = <T>(make: (shard: Uint8Array) => fc.Arbitrary<T>): fc.Arbitrary<T[]> =>
  fc.tuple(...CONTENTS.map(make));

/**
 * The server's responses to the first and to the second attempt: bytes in pieces, a status, or a broken
 * connection.
 */
const replies = one((shard) =>
  fc.array(
    fc.oneof({ weight: 4, arbitrary: bytesLike(shard) }, fc.constantFrom(404, 500, 206, "broken" as const)),
    {
      minLength: 1,
      maxLength: 2,
    },
  ),
);

test("shards are what the manifest states, whatever the storage and the server hold", async () => {
  const faults = fc.array(fc.boolean(), { maxLength: 12 });
  await fc.assert(
    fc.asyncProperty(one(bytesLike), replies, faults, async (stored, answers, failing) => {
      const files = new Map(SHARDS.map(({ sha256 }, i) => [sha256, stored[i] ?? null]));
      let calls = 0;
      const touch = async (): Promise<void> => {
        if (failing[calls++]) throw new DOMException("the storage is gone", "UnknownError");
      };
      const cache: FileCache = {
        get: async (key) => touch().then(() => files.get(key) ?? null),
        put: async (key, bytes) => touch().then(() => void files.set(key, bytes.slice())),
        delete: async (key) => touch().then(() => void files.delete(key)),
      };
      const tries = [0, 0, 0];
      const fetch = async (url: URL): Promise<Response> => {
        const i = Number(/(\d)\.bin/.exec(url.href)?.[1]);
        const list = answers[i] ?? [];
        const answer = list[Math.min(tries[i] ?? 0, list.length - 1)] ?? null;
        tries[i] = (tries[i] ?? 0) + 1;
        if (answer === "broken") throw new TypeError("Failed to fetch");
        return typeof answer === "number" ? new Response("no", { status: answer }) : new Response(answer);
      };
      const loaded: Uint8Array[] = [];
      const base = new URL("http://x/artifact/");
      try {
        for await (const shard of streamShards(base, SHARDS, { cache, fetch })) loaded.push(shard);
        expect(loaded).toEqual(CONTENTS);
      } catch (error) {
        expect(error).toBeInstanceOf(ArtifactError);
        expect(loaded).toEqual(CONTENTS.slice(0, loaded.length));
      }
    }),
    effort(300),
  );
});
