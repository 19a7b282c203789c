import { readFileSync } from "node:fs";
import { mkdtemp, rm } from "node:fs/promises";
import { SourceMap } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { buildSmall } from "../scripts/shrink.mjs";

/** A licence that has to stay, a name that somebody reads, and a line that a debugger has to find. */
const SOURCE = `/*! @license MIT, of somebody */
export function answer(question) {
  const unused = 1;
  const found = { kept_name: question.length };
  if (question === "") throw new Error("an empty question");
  return found;
}
`;

describe("what esbuild made, shrunk once more", () => {
  let folder: string;
  const read = (name: string): string => readFileSync(join(folder, name), "utf8");

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "nearfar-shrink-"));
    await buildSmall({
      stdin: { contents: SOURCE, sourcefile: "answer.ts", loader: "ts" },
      outfile: join(folder, "answer.js"),
      bundle: true,
      format: "esm",
      minify: true,
      legalComments: "eof",
      sourcemap: "linked",
    });
  });
  afterAll(() => rm(folder, { recursive: true, force: true }));

  test("does the same, and names what it exports", async () => {
    const { answer } = (await import(join(folder, "answer.js"))) as { answer(question: string): object };
    expect(answer("why")).toEqual({ kept_name: 3 });
  });

  test("keeps licences", () => expect(read("answer.js")).toContain("@license MIT, of somebody"));

  test("keeps directives", async () => {
    const contents = '"use client";\nexport const answer = 42;\n';
    const { outputFiles } = await buildSmall({
      stdin: { contents },
      format: "esm",
      minify: true,
      write: false,
    });
    expect(Buffer.from(outputFiles[0]?.contents ?? []).toString()).toMatch(/^"use client";/);
  });

  test("leads to the source", () => {
    const script = read("answer.js");
    expect(script).toContain("//# sourceMappingURL=answer.js.map");
    const before = script.slice(0, script.indexOf("an empty question")).split("\n");
    const map = new SourceMap(JSON.parse(read("answer.js.map")));
    const found = map.findEntry(before.length - 1, before.at(-1)?.length ?? 0);
    expect(found).toMatchObject({ originalSource: expect.stringContaining("answer.ts"), originalLine: 4 });
  });

  test("is the same each time, made anew or kept", async () => {
    const again = { stdin: { contents: SOURCE, loader: "ts" }, minify: true, write: false } as const;
    const [one, two] = [await buildSmall(again), await buildSmall(again)];
    expect(one.outputFiles).toEqual(two.outputFiles);
  });

  test("of what is not written gives the files alone", async () => {
    const { outputFiles } = await buildSmall({
      stdin: { contents: SOURCE, loader: "ts" },
      outfile: join(folder, "not-written.js"),
      bundle: true,
      minify: true,
      write: false,
    });
    expect(outputFiles.map(({ path }) => path)).toEqual([join(folder, "not-written.js")]);
    expect(() => read("not-written.js")).toThrow();
  });
});
