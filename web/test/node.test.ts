import { execFile } from "node:child_process";
import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { promisify } from "node:util";
import { afterAll, beforeAll, expect, test } from "vitest";
import { builtPackage } from "./support/built.js";
import { toyWasm } from "./support/toy-wasm.js";

/** The built nearfar/node, in a Node process of its own. */
let entry = "";
let folder = "";

async function put(path: string, contents: Uint8Array | string): Promise<void> {
  const place = join(folder, path);
  await mkdir(dirname(place), { recursive: true });
  await writeFile(place, contents);
}

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), "nearfar-"));
  const { files } = await toyWasm();
  entry = pathToFileURL(join((await builtPackage()).folder, "dist/node/index.js")).href;
  for (const [path, contents] of files) await put(join("toy", path), contents);
  await put("package.json", '{"type": "module"}');
}, 180_000);
afterAll(() => rm(folder, { recursive: true, force: true }));

/** The output of a program with `createEngine` and the toy's folder, after it has ended by itself. */
async function run(code: string): Promise<unknown> {
  const toy = JSON.stringify(join(folder, "toy"));
  await put(
    "program.js",
    `import { createEngine } from ${JSON.stringify(entry)};\nconst toy = ${toy};\n${code}`,
  );
  const { stdout } = await promisify(execFile)(process.execPath, [join(folder, "program.js")]);
  return JSON.parse(stdout);
}

test("an engine that is disposed leaves nothing that keeps Node alive", async () => {
  const left = await run(`
    const engine = await createEngine(toy);
    await engine.completions.create({ prompt: "a", max_tokens: 5, temperature: 0 });
    const running = process.getActiveResourcesInfo();
    await engine.dispose();
    const left = process.getActiveResourcesInfo();
    process.stdout.write(JSON.stringify({ running, timers: left.filter((name) => name === "Timeout") }));`);
  expect(left).toEqual({ running: expect.arrayContaining(["MessagePort"]), timers: [] });
});
