// @ts-check
/** Fails when the package, gzipped, is larger than a web app should have to load. */
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { bundle, bundleHere, ENTRIES } from "./bundle.mjs";

/** Other people's interfaces over an engine, each alone: the engine comes when it is asked for. */
export const ADAPTERS = /** @type {const} */ (["openai", "ai-sdk", "react", "prompt-api"]);

/**
 * Bytes of gzip: the runtime alone; the routing SDK alone, without an engine; each adapter; what tells of a
 * model before it is loaded; all of an engine, with tokenizer and chat template.
 */
export const LIMITS = {
  runtime: 60_000,
  routing: 21_000,
  openai: 2_000,
  "ai-sdk": 2_500,
  react: 2_000,
  "prompt-api": 4_000,
  models: 11_000,
  all: 100_000,
};

/** Gzipped bytes of what the entries import statically, and of everything. */
export async function measure() {
  const { metafile, outputFiles = [] } = await bundle({ write: false });
  // Without the worker's copy, which is loaded only where the worker's file cannot be.
  const paths = Object.keys(metafile.outputs).filter((path) => !path.includes("/worker-source-"));
  /** @param {string} path */
  const size = (path) => {
    const file = outputFiles.find((output) => output.path.endsWith(`/${path}`));
    if (!file) throw new Error(`esbuild lists ${path}, but has not made it`);
    return gzipSync(file.contents, { level: 9 }).length;
  };
  /** @param {string[]} entries */
  const closure = (entries) => {
    /** @type {Set<string>} */
    const seen = new Set();
    /** @param {string} path */
    const visit = (path) => {
      if (seen.has(path)) return;
      seen.add(path);
      for (const imported of metafile.outputs[path]?.imports ?? [])
        if (imported.kind === "import-statement" && !imported.external) visit(imported.path);
    };
    for (const path of paths) if (entries.includes(metafile.outputs[path]?.entryPoint ?? "")) visit(path);
    return seen;
  };
  const adapters = ADAPTERS.map((name) => ENTRIES[name]).map(String);
  const others = paths.filter((path) => !adapters.includes(metafile.outputs[path]?.entryPoint ?? ""));
  /** @param {Iterable<string>} some */
  const sum = (some) => [...some].reduce((total, path) => total + size(path), 0);
  return {
    runtime: sum(closure([ENTRIES.index, ENTRIES.worker])),
    routing: sum(closure([ENTRIES["routing/index"]])),
    .../** @type {Record<typeof ADAPTERS[number], number>} */ (
      Object.fromEntries(ADAPTERS.map((name) => [name, sum(closure([ENTRIES[name]]))]))
    ),
    models: await sizeOfModels(),
    all: sum(others),
  };
}

/** What tells of a model before it is loaded. */
async function sizeOfModels() {
  const { outputFiles = [] } = await bundleHere({ write: false });
  const file = outputFiles.find(({ path }) => path.endsWith("/models.js"));
  return gzipSync(file?.contents ?? "", { level: 9 }).length;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const sizes = await measure();
  for (const name of /** @type {const} */ (["runtime", "routing", ...ADAPTERS, "models", "all"])) {
    const fits = sizes[name] <= LIMITS[name];
    process.stdout.write(
      `${name}: ${sizes[name]} bytes gzipped, at most ${LIMITS[name]}${fits ? "" : ": TOO LARGE"}\n`,
    );
    if (!fits) process.exitCode = 1;
  }
}
