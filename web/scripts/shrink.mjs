// @ts-check
/** esbuild, and terser after it, whose passes leave 3 to 5 % fewer bytes, gzipped, than esbuild alone. */
import { createHash } from "node:crypto";
import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { minify } from "terser";

/**
 * Only what keeps the meaning of any code: terser's `unsafe` options stay off, properties keep their names
 * (mangling each one that could be would spare 3 % more, and break what other code reads), and directives stay, for
 * frameworks read more of them than engines do ("use client").
 * @type {import("terser").MinifyOptions}
 */
const OPTIONS = { ecma: 2022, compress: { passes: 3, directives: false }, format: { comments: "some" } };

/** What is larger holds a library that came minified: a third of a percent for seconds of a build. */
const MOST_BYTES = 1_000_000;

const modules = new URL("../node_modules/", import.meta.url);
/** Terser takes 10 s for the package, and each file of tests builds it anew: what it made is kept. */
const KEPT = fileURLToPath(new URL(".cache/nearfar-shrink/", modules));
const TERSER = await readFile(new URL("terser/package.json", modules), "utf8");

/** @typedef {{ readonly path: string, readonly contents: Uint8Array }} File */

/**
 * A build of esbuild with its scripts shrunk once more, and its files; written unless `write` is false.
 * @param {import("esbuild").BuildOptions} options
 * @returns {Promise<{ metafile: import("esbuild").Metafile, outputFiles: File[] }>}
 */
export async function buildSmall({ write = true, ...options }) {
  const { metafile, outputFiles } = await build({ ...options, metafile: true, write: false });
  const isModule = options.format === "esm";
  const shrunk = await Promise.all(
    outputFiles.map((file) => {
      const map = outputFiles.find(({ path }) => path === `${file.path}.map`);
      if (file.path.endsWith(".map")) return [];
      const isSmall = file.path.endsWith(".js") && file.contents.length < MOST_BYTES;
      return isSmall ? shrink(file, map, isModule) : [file, ...(map ? [map] : [])];
    }),
  );
  const files = shrunk.flat();
  if (write) await Promise.all(files.map(({ path, contents }) => put(path, contents)));
  return { metafile, outputFiles: files };
}

/**
 * @param {import("esbuild").OutputFile} script
 * @param {import("esbuild").OutputFile | undefined} map
 * @param {boolean} isModule
 * @returns {Promise<File[]>}
 */
async function shrink(script, map, isModule) {
  const name = basename(script.path);
  // With the sources: the package has none of the files that the map names, and Parcel fails where it reads them.
  const sourceMap = map && { content: map.text, filename: name, url: `${name}.map`, includeSources: true };
  const options = { ...OPTIONS, module: isModule, ...(sourceMap && { sourceMap }) };
  const [code, mapped] = await kept(JSON.stringify([TERSER, options, script.text]), async () => {
    const made = await minify(script.text, options);
    return [made.code ?? "", String(made.map ?? "")];
  });
  const file = { path: script.path, contents: Buffer.from(code) };
  return map ? [file, { path: map.path, contents: Buffer.from(mapped) }] : [file];
}

/**
 * What was made of the same input before, or else is made now.
 * @param {string} input
 * @param {() => Promise<readonly [string, string]>} make
 * @returns {Promise<readonly [string, string]>}
 */
async function kept(input, make) {
  const path = join(KEPT, createHash("sha256").update(input).digest("hex"));
  const found = await readFile(path, "utf8").catch(() => null);
  if (found !== null) return JSON.parse(found);
  const made = await make();
  // Another process may be at the same: who is last wins, and nobody reads half a file.
  const part = `${path}.${process.pid}`;
  // A folder that cannot be written to costs time alone.
  await put(part, JSON.stringify(made)).then(
    () => rename(part, path),
    () => {},
  );
  return made;
}

/**
 * Writes a file, with the folders that it needs.
 * @param {string} path
 * @param {Uint8Array | string} contents
 */
export async function put(path, contents) {
  await mkdir(dirname(path), { recursive: true });
  await writeFile(path, contents);
}
