/** The apps of web/apps as their users write them, with further requests of the tests (test/asks). */

import { cp, mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { build } from "esbuild";
import type { Browser, Page } from "playwright-core";
import { expect } from "vitest";
import type { Installed } from "./built.js";
import { HERMES, TOOLS_TEMPLATE } from "./parrot.js";
import { WEB } from "./programs.js";
import { type StaticServer, serve } from "./serve.js";
import { toyArtifact } from "./toy-artifact.js";
import { promptOf, TEMPLATE, textAfter } from "./toy-chat.js";
import { parrotWasm, toyWasm } from "./toy-wasm.js";

/** The text that each app streams. */
export const TEXT = textAfter(promptOf([{ role: "user", content: "Tell me a story." }]), 24);
/** A time limit: webpack took 4 minutes when 15 programs shared two processors. */
export const PATIENCE_MS = 600_000;
/** Apps are tested side by side: building needs processors, while answering in a browser is mostly waiting. */
export const BESIDE = { timeout: PATIENCE_MS, concurrent: true };

const ASKS = join(WEB, "test/asks");

/** Folders of apps, each overwriting the one before: the page with its own engine, and with a shared one. */
export const SOURCES = [
  { app: "page", sources: ["page"] },
  { app: "shared", sources: ["page", "shared"] },
];

/** Copies folders of web/apps, each overwriting the one before, beside the installed package. */
export async function copyApp({ root }: Installed, name: string, ...folders: string[]): Promise<string> {
  const app = join(root, name);
  const dependencies = { nearfar: "*" };
  // Parcel takes a folder with a lock file for a project of its own.
  await writeFiles(app, [
    ["package.json", JSON.stringify({ name, type: "module", dependencies })],
    ["package-lock.json", "{}"],
  ]);
  for (const folder of folders) await cp(join(WEB, "apps", folder), app, { recursive: true });
  return app;
}

/** Copies an app whose script is main.js, and adds the questions of test/asks to its own. */
export async function copyAsking(installed: Installed, name: string, ...folders: string[]): Promise<string> {
  const app = await copyApp(installed, name, ...folders);
  await rename(join(app, "main.js"), join(app, "story.js"));
  await copyAsks(app);
  await cp(join(ASKS, folders.includes("shared") ? "shared.js" : "main.js"), join(app, "main.js"));
  return app;
}

/** nearfar/ai-sdk imports the second package, which a page without a bundler must also get. */
const AI = `export { generateText, jsonSchema, Output } from "ai"; export * from "@ai-sdk/provider";`;

/** Puts asks.js and ai.js into a folder. */
export async function copyAsks(folder: string): Promise<void> {
  ai ??= build({
    stdin: { contents: AI, resolveDir: WEB },
    bundle: true,
    format: "esm",
    platform: "browser",
    minify: true,
    // Globals of Node, for which Parcel would install polyfills.
    define: { Buffer: "undefined", process: "undefined" },
    write: false,
  }).then(({ outputFiles: [file] }) => file?.contents ?? new Uint8Array());
  await cp(join(ASKS, "asks.js"), join(folder, "asks.js"));
  await writeFile(join(folder, "ai.js"), await ai);
}

let ai: Promise<Uint8Array> | null = null;

export async function writeFiles(
  folder: string,
  files: Iterable<readonly [string, string | Uint8Array]>,
): Promise<void> {
  for (const [path, content] of files) {
    await mkdir(dirname(join(folder, path)), { recursive: true });
    await writeFile(join(folder, path), content);
  }
}

let models: Promise<ReadonlyMap<string, Uint8Array>> | null = null;

/** Files by path: model/ runs through WebGPU; parrot/, with scripted answers, through WebAssembly. */
export function modelFiles(): Promise<ReadonlyMap<string, Uint8Array>> {
  models ??= withModel(toyArtifact({ chatTemplate: TEMPLATE }).files);
  return models;
}

/** The files of the app's model for browsers without WebGPU. */
export async function wasmFiles(): Promise<ReadonlyMap<string, Uint8Array>> {
  return withModel((await toyWasm(TEMPLATE)).files);
}

async function withModel(model: ReadonlyMap<string, Uint8Array>): Promise<ReadonlyMap<string, Uint8Array>> {
  const { files } = await parrotWasm(TOOLS_TEMPLATE, { answers: { ...HERMES, reasoning: null } });
  return new Map([...prefixed("model/", model), ...prefixed("parrot/", files)]);
}

function prefixed(prefix: string, files: ReadonlyMap<string, Uint8Array>): [string, Uint8Array][] {
  return [...files].map(([path, content]) => [`${prefix}${path}`, content]);
}

/** Serves a built folder beside the models. */
export async function serveFolder(
  folder: string,
  files?: ReadonlyMap<string, Uint8Array>,
): Promise<StaticServer> {
  const models = files ?? (await modelFiles());
  return serve(async (path) => models.get(path) ?? (await readFile(join(folder, path)).catch(() => null)));
}

/** The final text of a page: the model's answer, or the error. */
export async function answerOf(page: Page, url: string | URL): Promise<string> {
  const failed = new Promise<string>((resolve) => page.on("pageerror", (error) => resolve(String(error))));
  await page.goto(String(url));
  const said = (text: string) => document.querySelector("#answer")?.textContent === text;
  const whole = page.waitForFunction(said, TEXT, { timeout: PATIENCE_MS - 20_000 }).then(
    () => TEXT,
    async () => `not in time: ${await page.innerHTML("body")}`,
  );
  return Promise.race([failed, whole]);
}

/** Reads, in the page, the result that test/asks puts there when it has all answers. */
export function toldIn(): string | null {
  const told = document.querySelector("#asked, #failed");
  return told?.textContent ?? null;
}

/** Checks the answers that test/asks got. */
export function expectTold(told: unknown): void {
  expect(String(told)).toMatch(/^\{/);
  const pet = {
    kind: expect.stringMatching(/^(cat|dog)$/),
    legs: expect.toSatisfy((legs: number) => Number.isInteger(legs) && legs >= 0 && legs <= 8, "0 to 8"),
  };
  const { call, ...rest } = JSON.parse(String(told));
  expect(rest).toEqual({ format: pet, object: pet, left: "left", after: "Yes." });
  expect(call).toMatchObject({ reason: "tool_calls", name: "weather" });
  expect(["Oslo", "Rome"]).toContain(JSON.parse(call.arguments).city);
}

/**
 * Expects a new tab to show the text, and to get the answers to its further requests. The engine is in a worker
 * of the page or, with `shared`, in one of all pages.
 */
export async function expectAnswers(browser: Browser, url: string | URL, shared = false): Promise<void> {
  const context = await browser.newContext();
  try {
    const page = await context.newPage();
    let workers = 0;
    page.on("worker", () => workers++);
    expect(await answerOf(page, url)).toBe(TEXT);
    await expectAsked(page);
    expect(workers > 0).toBe(!shared);
  } finally {
    await context.close();
  }
}

/** Expects a page that has shown its text to get the answers to its further requests. */
export async function expectAsked(page: Page): Promise<void> {
  const told = await page.waitForFunction(toldIn, undefined, { timeout: 120_000 });
  expectTold(await told.jsonValue());
}
