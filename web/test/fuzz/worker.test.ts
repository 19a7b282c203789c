import fc from "fast-check";
import { expect, test, vi } from "vitest";
import type { FromWorker } from "../../src/protocol/messages.js";
import { effort } from "./effort.js";

const TYPES = ["load", "generate", "abort", "stats", "count", "dispose", "constructor"];
/** Values that postMessage can send. */
const anything = fc.anything({ withBigInt: true, withMap: true, withTypedArray: true, maxDepth: 3 });
const message = fc
  .dictionary(fc.constantFrom("id", "request", "settings", "url", "prompt"), anything)
  .chain((fields) =>
    fc.constantFrom(...TYPES).map((type) => ({ id: 1, url: "no address", settings: {}, ...fields, type })),
  );

test("the worker answers what makes no sense, and goes on", async () => {
  const said: FromWorker[] = [];
  let hear: (event: { data: unknown }) => void = () => undefined;
  vi.stubGlobal("postMessage", (told: FromWorker) => said.push(structuredClone(told)));
  vi.stubGlobal("addEventListener", (_: string, listener: typeof hear) => {
    hear = listener;
  });
  await import("../../src/worker/index.js");
  expect(said).toEqual([{ type: "started" }]);
  await fc.assert(
    fc.asyncProperty(fc.array(message, { maxLength: 4 }), async (messages) => {
      for (const data of messages) hear({ data });
      said.length = 0;
      hear({ data: { type: "count", id: 7, prompt: { kind: "text", text: "x" } } });
      expect(said).toMatchObject([
        {
          type: "counted",
          id: 7,
          tokens: { kind: "device", message: expect.stringContaining("not loaded") },
        },
      ]);
      said.length = 0;
      hear({ data: { type: "dispose" } });
      await vi.waitFor(() => expect(said).toContainEqual({ type: "disposed", stats: null }), 30_000);
    }),
    effort(40),
  );
});
