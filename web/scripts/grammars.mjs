// @ts-check
/**
 * The library that follows grammars, @mlc-ai/web-xgrammar, as a module. npm has it as a UMD script, which looks
 * for `exports`, for `define` and for a global scope: bundlers of apps take other branches of that than a
 * browser does. And it is there once for all, while one that has aborted cannot be used again.
 */
import { readFile } from "node:fs/promises";

/** The library's file, on any system. */
export const LIBRARY = /web-xgrammar[\\/]lib[\\/]index\.js$/;

const HEAD = /^\(function \(global, factory\) \{.*?\}\)\(this, \(function \(exports\) \{/s;
const TAIL = /\}\)\);\s*(\/\/# sourceMappingURL=\S+\s*)?$/;
const MODULE = `});
export function fresh() { const made = {}; factory(made); return made; }
`;

/** Globals of Node, for which Parcel would install stand-ins. */
const NO_NODE = "const process = undefined, Buffer = undefined;\n";
/** What it does in Node: bundlers of apps for browsers stumble over it. */
const NODE = {
  module: "await import('module')",
  address: "require('u' + 'rl').pathToFileURL(__filename).href",
};

/**
 * The module's text: it exports `fresh`, which makes a library with a memory of its own.
 *
 * @param {string} text the UMD script
 * @param {"browser" | "node"} platform
 * @throws Error where the script is another than this function expects
 */
export function asModule(text, platform) {
  for (const part of [HEAD, TAIL, NODE.module, NODE.address])
    if (typeof part === "string" ? !text.includes(part) : !part.test(text))
      throw new Error(`@mlc-ai/web-xgrammar has another version: it lacks ${part}`);
  const made = text.replace(HEAD, "const factory = (function (exports) {").replace(TAIL, MODULE);
  if (platform === "node") return made.replaceAll(NODE.address, "import.meta.url");
  return NO_NODE + made.replaceAll(NODE.address, '""').replaceAll(NODE.module, "{}");
}

/**
 * For esbuild.
 * @param {"browser" | "node"} platform
 * @returns {import("esbuild").Plugin}
 */
export function grammarsAsModule(platform) {
  return {
    name: "grammars as a module",
    setup({ onLoad }) {
      onLoad({ filter: LIBRARY }, async ({ path }) => ({
        contents: asModule(await readFile(path, "utf8"), platform),
        loader: "js",
      }));
    },
  };
}
