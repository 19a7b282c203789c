import { readFileSync } from "node:fs";
import { beforeAll, expect, test } from "vitest";
import { LIMITS, MOST_FILES, measure } from "../scripts/size.mjs";

let measured: Awaited<ReturnType<typeof measure>>;
beforeAll(async () => {
  measured = await measure();
}, 180_000);

test("the package stays small", () => {
  const { files, ...sizes } = measured;
  expect(Object.keys(sizes).sort()).toEqual(Object.keys(LIMITS).sort());
  for (const [name, limit] of Object.entries(LIMITS)) {
    const bytes = sizes[name as keyof typeof LIMITS];
    expect(bytes, name).toBeGreaterThan(limit / 2);
    expect(bytes, name).toBeLessThanOrEqual(limit);
  }
  expect(files).toBeLessThanOrEqual(MOST_FILES);
});

/** Kilobytes by which a documented size may be off, so that small changes keep the pages true. */
const NEAR = 1.5;

test("the pages tell the sizes as they are", () => {
  const { webgpu, wasm, text, routing } = measured;
  const told = (page: string, pattern: RegExp): number[] => {
    const found = pattern.exec(readFileSync(new URL(`../${page}`, import.meta.url), "utf8"));
    if (!found) throw new Error(`${page} tells no ${pattern}`);
    return found.slice(1).map(Number);
  };
  const engine = /of\s(\S+) kB \(gzip\) with WebGPU or (\S+) kB with WebAssembly, and (\S+) kB more/;
  const said = [
    ...told("README.md", engine),
    ...told("README.md", /without the engine: (\S+) kB \(gzip\)/),
    ...told("docs/clients.md", /with WebGPU +\| +(\S+) kB +\| +(\S+) kB/),
    ...told("docs/clients.md", /with WebAssembly +\| +(\S+) kB +\| +(\S+) kB/),
  ];
  const real = [webgpu, wasm, text, routing, webgpu, webgpu + text, wasm, wasm + text];
  for (const [at, bytes] of real.entries())
    expect(Math.abs((said[at] ?? 0) - bytes / 1000), `${said[at]} kB, really ${bytes}`).toBeLessThan(NEAR);
});
