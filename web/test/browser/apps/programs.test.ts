/** Programs of Node and Deno, as their users write them. */

import { spawnSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { beforeAll, describe, expect, test } from "vitest";
import { BESIDE, copyApp, PATIENCE_MS, TEXT, writeFiles } from "../../support/apps.js";
import { type Installed, installPackage } from "../../support/built.js";
import { run, WEB } from "../../support/programs.js";
import { toyArtifact } from "../../support/toy-artifact.js";
import { TEMPLATE } from "../../support/toy-chat.js";
import { toyWasm } from "../../support/toy-wasm.js";

/** Chromium's Vulkan driver for the CPU, which Dawn uses where there is no GPU. */
const SWIFTSHADER = ["/usr/lib/chromium/vk_swiftshader_icd.json"].find((path) => existsSync(path)) ?? null;
/** npm's Deno if its binary is for this machine; else the system's. */
const DENO = findDeno();

const model = toyArtifact({ chatTemplate: TEMPLATE }).files;
let installed: Installed;

beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

describe("a program", BESIDE, () => {
  async function programFolder(name: string, files: ReadonlyMap<string, Uint8Array>): Promise<string> {
    const app = await copyApp(installed, name, name.split("-")[0] ?? name);
    await writeFiles(join(app, "model"), files);
    return app;
  }

  test("of Node, through WebAssembly", async () => {
    const app = await programFolder("node", (await toyWasm(TEMPLATE)).files);
    expect(await run(process.execPath, ["main.mjs"], app)).toBe(TEXT);
  });

  test.skipIf(!SWIFTSHADER)("of Node, through Dawn", async () => {
    const app = await programFolder("node-gpu", model);
    const env = { VK_ICD_FILENAMES: SWIFTSHADER ?? "" };
    expect(await run(process.execPath, ["gpu.mjs"], app, env)).toBe(TEXT);
  });

  const ALLOWED = ["run", "--allow-read", "--allow-env", "--allow-sys"];

  test.skipIf(!DENO)("of Deno, through WebAssembly", async () => {
    const app = await programFolder("deno", (await toyWasm(TEMPLATE)).files);
    expect(await run(DENO ?? "", [...ALLOWED, "main.js"], app)).toBe(TEXT);
  });

  test.skipIf(!DENO || !SWIFTSHADER)("of Deno, through its WebGPU", async () => {
    const app = await programFolder("deno-gpu", model);
    const env = { VK_ICD_FILENAMES: SWIFTSHADER ?? "" };
    expect(await run(DENO ?? "", [...ALLOWED, "--unstable-webgpu", "main.js"], app, env)).toBe(TEXT);
  });
});

function findDeno(): string | null {
  const own = join(WEB, "node_modules/.bin/deno");
  return [own, "deno"].find((command) => spawnSync(command, ["--version"]).status === 0) ?? null;
}
