import { type ChildProcess, spawn, spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync } from "node:fs";
import { cp, readFile } from "node:fs/promises";
import { join } from "node:path";
import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { copyApp, writeFiles } from "../support/apps.js";
import { type Installed, installPackage } from "../support/built.js";
import { CHROMIUM, openChromium, openChromiumWith } from "../support/chromium.js";
import { FIREFOX, openFirefox } from "../support/firefox.js";
import { run, WEB } from "../support/programs.js";
import { type StaticServer, serve } from "../support/serve.js";
import { toyArtifact } from "../support/toy-artifact.js";
import { promptOf, TEMPLATE, textAfter } from "../support/toy-chat.js";
import { toyWasm } from "../support/toy-wasm.js";

/**
 * The apps of web/apps, as their users write them, with the package as npm installs it: each is built and
 * served by its own tool, and streams the model's text.
 */
const TEXT = textAfter(promptOf([{ role: "user", content: "Tell me a story." }]), 24);
/** Only what stands still takes so long: webpack took 4 minutes where 15 programs shared two processors. */
const PATIENCE_MS = 600_000;
/** Building is work for processors, and answering in a browser is much waiting: each app beside others. */
const BESIDE = { timeout: PATIENCE_MS, concurrent: true };

/** Chromium's Vulkan on the processor, for Dawn where there is no GPU. */
const SWIFTSHADER = ["/usr/lib/chromium/vk_swiftshader_icd.json"].find((path) => existsSync(path)) ?? null;
/** npm's, where its binary is for this machine; else the system's. */
const DENO = findDeno();

/** Folders of apps, one over the other: the page with an engine of its own, and with one that pages share. */
const SOURCES = [
  { app: "page", sources: ["page"] },
  { app: "shared", sources: ["page", "shared"] },
];
/** Builds the app of its folder. What follows grammars is large, loaded late, and webpack warns of its size. */
const WEBPACK = `
  import webpack from "webpack";
  import config from "./webpack.config.mjs";
  const output = { ...config.output, path: process.cwd() + "/dist" };
  webpack({ ...config, context: process.cwd(), output, performance: false }, (error, made) => {
    if (error) throw error;
    const { errors, warnings } = made.toJson({ all: false, errors: true, warnings: true });
    process.stdout.write(JSON.stringify({ errors, warnings }));
  });
`;
const model = toyArtifact({ chatTemplate: TEMPLATE }).files;
let installed: Installed;
let browser: Browser;

beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

/** A built folder on a static server, with a model under /model/. */
function serveFolder(folder: string, files = model): Promise<StaticServer> {
  return serve(async (path) => {
    const inModel = files.get(path.replace(/^model\//, ""));
    return inModel ?? (await readFile(join(folder, path)).catch(() => null));
  });
}

/** What the page says in the end: the model's text, or what went wrong. */
async function answerOf(page: Page, url: string | URL): Promise<string> {
  const failed = new Promise<string>((resolve) => page.on("pageerror", (error) => resolve(String(error))));
  await page.goto(String(url));
  const said = (text: string) => document.querySelector("#answer")?.textContent === text;
  const whole = page.waitForFunction(said, TEXT, { timeout: PATIENCE_MS - 20_000 }).then(
    () => TEXT,
    async () => `not in time: ${await page.innerHTML("body")}`,
  );
  return Promise.race([failed, whole]);
}

/** A new tab says the text. The engine is in a worker of the page, or, `shared`, in one of all pages. */
async function expectAnswer(url: string | URL, shared = false): Promise<void> {
  const context = await browser.newContext();
  try {
    const page = await context.newPage();
    let workers = 0;
    page.on("worker", () => workers++);
    expect(await answerOf(page, url)).toBe(TEXT);
    expect(workers > 0).toBe(!shared);
  } finally {
    await context.close();
  }
}

describe.skipIf(!CHROMIUM)("an app in Chromium", BESIDE, () => {
  beforeAll(async () => {
    browser = await openChromium();
  });
  afterAll(() => browser?.close());

  async function expectAnswerFrom(folder: string, shared = false): Promise<void> {
    const server = await serveFolder(folder);
    await expectAnswer(new URL("index.html", server.url), shared).finally(() => server.close());
  }

  // The two that take longest begin.
  test("of Next: built, rendered on the server, and answering in the browser", async () => {
    const app = await copyApp(installed, "next", "next");
    await writeFiles(join(app, "public/model"), model);
    const next = join(WEB, "node_modules/next/dist/bin/next");
    await run(process.execPath, [next, "build", app], app);
    const server = spawn(process.execPath, [next, "start", app, "--port", "0", "--hostname", "127.0.0.1"], {
      cwd: app,
      env: { ...process.env, NEXT_TELEMETRY_DISABLED: "1" },
    });
    try {
      const url = await addressOf(server);
      expect(await (await fetch(url)).text()).toContain('<p id="answer"></p>');
      await expectAnswer(url);
    } finally {
      server.kill();
    }
  });

  test.each(SOURCES)("of webpack: $app", async ({ app: source, sources }) => {
    const app = await copyApp(installed, `webpack-${source}`, ...sources, "webpack");
    // As a program of its own, as its command line is: here it would hold up the apps beside it.
    const told = await run(process.execPath, ["--input-type=module", "--eval", WEBPACK], app);
    expect(JSON.parse(told)).toEqual({ errors: [], warnings: [] });
    await cp(join(app, "index.html"), join(app, "dist/index.html"));
    await expectAnswerFrom(join(app, "dist"), source === "shared");
  });

  describe.each([
    { name: "vite6", sources: ["page"] },
    { name: "vite7", sources: ["page"] },
    { name: "vite", sources: ["page"] },
    { name: "vite", sources: ["page", "shared"] },
  ])("of $name: $sources", ({ name, sources }) => {
    const load = async () => (await import(name)) as typeof import("vite");
    let app: string;
    beforeAll(async () => {
      app = await copyApp(installed, `${name}-${sources.at(-1)}`, ...sources, "vite");
      await writeFiles(join(app, "public/model"), model);
    });

    // One after the other: the development server watches the folder that the build writes to.
    test.sequential("runs on its development server, without any configuration", async () => {
      const { createServer } = await load();
      const server = await createServer({
        root: app,
        configFile: false,
        logLevel: "silent",
        server: { port: 0, host: "127.0.0.1" },
      });
      await server.listen();
      const shared = sources.includes("shared");
      await expectAnswer(server.resolvedUrls?.local[0] ?? "", shared).finally(() => server.close());
    });

    test.sequential("runs as it is built", async () => {
      const { build } = await load();
      const configFile = name === "vite" ? false : join(app, "vite.config.js");
      await build({ root: app, configFile, logLevel: "silent" });
      await expectAnswerFrom(join(app, "dist"), sources.includes("shared"));
    });
  });

  test.each(SOURCES)("of Rollup: $app", async ({ app: source, sources }) => {
    const app = await copyApp(installed, `rollup-${source}`, ...sources, "rollup");
    await run(process.execPath, [join(WEB, "node_modules/rollup/dist/bin/rollup"), "-c", "--silent"], app);
    await cp(join(app, "index.html"), join(app, "dist/index.html"));
    await expectAnswerFrom(join(app, "dist"), source === "shared");
  });

  test.each(SOURCES)("of esbuild: $app", async ({ app: source, sources }) => {
    const app = await copyApp(installed, `esbuild-${source}`, ...sources, "esbuild");
    await run(process.execPath, ["build.mjs"], app);
    await cp(join(app, "index.html"), join(app, "dist/index.html"));
    await expectAnswerFrom(join(app, "dist"), source === "shared");
  });

  test("of plain HTML, with the package on another origin", async () => {
    const cdn = await serve((path) => readFile(join(installed.root, "node_modules", path)).catch(() => null));
    try {
      const app = await copyApp(installed, "html", "html");
      const page = await readFile(join(app, "index.html"), "utf8");
      expect(page).toContain("https://cdn.example/");
      await writeFiles(app, [["index.html", page.replace("https://cdn.example/", cdn.url.href)]]);
      await expectAnswerFrom(app);
      // The worker came from there, not as a copy.
      expect(cdn.requests).toContain("nearfar/dist/worker.js");
      expect(cdn.requests.filter((path) => path.includes("worker-source"))).toEqual([]);
    } finally {
      cdn.close();
    }
  });

  test.each(["extension", "extension-background"])("that is an %s", async (name) => {
    const app = await copyApp(installed, name, name);
    await cp(join(installed.folder, "dist"), join(app, "nearfar"), { recursive: true });
    await writeFiles(join(app, "model"), model);
    const context = await openChromiumWith(join(installed.root, `${name}-profile`), app);
    try {
      // Chromium makes the name of an unpacked extension of its path.
      const hash = createHash("sha256").update(app).digest("hex").slice(0, 32);
      const id = hash.replace(/./g, (digit) => String.fromCharCode(97 + Number.parseInt(digit, 16)));
      const page = await context.newPage();
      expect(await answerOf(page, `chrome-extension://${id}/panel.html`)).toBe(TEXT);
    } finally {
      await context.close();
    }
  });
});

function findDeno(): string | null {
  const own = join(WEB, "node_modules/.bin/deno");
  return [own, "deno"].find((command) => spawnSync(command, ["--version"]).status === 0) ?? null;
}

describe.skipIf(!FIREFOX)("an app in Firefox", BESIDE, () => {
  test("of plain HTML answers through WebAssembly", async () => {
    const app = await copyApp(installed, "firefox", "html");
    const page = await readFile(join(app, "index.html"), "utf8");
    await writeFiles(app, [["index.html", page.replace("https://cdn.example/", "/")]]);
    await cp(installed.folder, join(app, "nearfar"), { recursive: true });
    const server = await serveFolder(app, (await toyWasm(TEMPLATE)).files);
    const firefox = await openFirefox();
    try {
      const tab = await firefox.newPage();
      await tab.goto(String(new URL("index.html", server.url)));
      const said = (text: string) => document.querySelector("#answer")?.textContent === text;
      await tab.waitForFunction(said, { timeout: PATIENCE_MS - 20_000 }, TEXT);
    } finally {
      await firefox.close();
      server.close();
    }
  });
});

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

/** The address that a server prints. What it prints later is read too: writing to a closed pipe ends it. */
function addressOf({ stdout }: ChildProcess): Promise<string> {
  return new Promise((resolve, reject) => {
    let printed = "";
    stdout?.on("data", (chunk) => {
      printed += chunk;
      const url = /http:\/\/127\.0\.0\.1:\d+/.exec(printed)?.[0];
      if (url) resolve(url);
    });
    stdout?.on("end", () => reject(new Error(`the server ended: ${printed}`)));
  });
}
