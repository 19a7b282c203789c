// @ts-check
/** Builds the package: what `npm pack` takes of this folder, all but package.json, README.md and docs/. */
import { execFile } from "node:child_process";
import { cp, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { bundle, bundleHere, bundleNode } from "./bundle.mjs";
import { noticesOf } from "./notices.mjs";

const web = fileURLToPath(new URL("..", import.meta.url));

/**
 * Builds into `folder`: dist/ and LICENSE.
 * @param {string} folder
 */
export async function buildPackage(folder) {
  const dist = join(folder, "dist");
  await rm(dist, { recursive: true, force: true });
  await Promise.all([buildScripts(folder), buildTypes(join(dist, "types"))]);
}

/**
 * All of it but the declarations.
 * @param {string} folder
 */
export async function buildScripts(folder) {
  const dist = join(folder, "dist");
  await mkdir(join(dist, "routing"), { recursive: true });
  // Bundled for dist/ wherever it goes: the maps of sources are the same.
  const made = await Promise.all([bundle(), bundleNode(), bundleHere()]);
  await Promise.all([
    ...made
      .flatMap(({ outputFiles }) => outputFiles)
      .map(({ path, contents }) => put(join(folder, relative(web, path)), contents)),
    // Both have their home elsewhere in the repository.
    cp(join(web, "../routing/difficulty/model.json"), join(dist, "routing/difficulty.json")),
    cp(join(web, "../LICENSE"), join(folder, "LICENSE")),
  ]);
  await put(join(dist, "NOTICES.txt"), await noticesOf(made.map(({ metafile }) => metafile)));
}

/**
 * Writes a file, with the folders that it needs.
 * @param {string} path
 * @param {Uint8Array | string} contents
 */
async function put(path, contents) {
  await mkdir(dirname(path), { recursive: true });
  await writeFile(path, contents);
}

/**
 * The declarations of the package's entries.
 * @param {string} types
 * @param {...string} more options of tsc
 */
export async function buildTypes(types, ...more) {
  const tsc = join(web, "node_modules/typescript/bin/tsc");
  const options = [tsc, "-p", "tsconfig.build.json", "--outDir", types, ...more];
  await promisify(execFile)(process.execPath, options, { cwd: web });
  await dropInnerTypes(types);
}

/**
 * Deletes the declarations that no entry's refer to: nobody can see them, and some need packages that are
 * bundled, so not installed.
 * @param {string} types
 */
async function dropInnerTypes(types) {
  const { exports } = JSON.parse(await readFile(join(web, "package.json"), "utf8"));
  /** @type {string[]} */
  const entries = Object.values(exports).flatMap((target) => target.types ?? []);
  const seen = new Set(entries.map((path) => join(types, path.replace("./dist/types/", ""))));
  // A set that grows is walked to its end.
  for (const path of seen)
    for (const [, from = ""] of (await readFile(path, "utf8")).matchAll(/["'](\.{1,2}\/[^"']+)\.js["']/g))
      seen.add(`${resolve(dirname(path), from)}.d.ts`);
  const all = await readdir(types, { recursive: true, withFileTypes: true });
  const paths = all.flatMap((each) => (each.isFile() ? join(each.parentPath, each.name) : []));
  await Promise.all(paths.filter((path) => !seen.has(path)).map((path) => rm(path)));
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await buildPackage(web);
