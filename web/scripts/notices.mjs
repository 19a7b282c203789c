// @ts-check
/** The licences of the packages that the bundles hold, whose text must go where their code goes. */
import { readdir, readFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const web = fileURLToPath(new URL("..", import.meta.url));

/**
 * A folder of node_modules, by the path of a file in it: the innermost, which is the file's own package.
 * @param {string} path
 */
function packageOf(path) {
  return /^.*node_modules\/(?:@[^/]+\/)?[^/]+/.exec(path)?.[0] ?? null;
}

/**
 * One paragraph for each package that esbuild has bundled, by name; a package without a licence is an error.
 * @param {readonly import("esbuild").Metafile[]} metafiles
 */
export async function noticesOf(metafiles) {
  const bundled = metafiles.flatMap(({ outputs }) =>
    Object.values(outputs).flatMap(({ inputs }) => Object.keys(inputs)),
  );
  const folders = new Set(bundled.flatMap((path) => packageOf(path) ?? []));
  const notices = await Promise.all([...folders].map((folder) => noticeOf(join(web, folder))));
  const head = "nearfar's code is under the licence in LICENSE. It is bundled with these packages:";
  return `${[head, ...notices.sort()].join(`\n\n${"-".repeat(80)}\n\n`)}\n`;
}

/** @param {string} folder */
async function noticeOf(folder) {
  const { name, version, license, homepage, author } = JSON.parse(
    await readFile(join(folder, "package.json"), "utf8"),
  );
  const files = (await readdir(folder)).filter((file) => /^(licen[cs]e|notice|copying)/i.test(file)).sort();
  const texts = await Promise.all(files.map((file) => readFile(join(folder, file), "utf8")));
  // nearfar's own, whose text has no names to fill in.
  if (texts.length === 0 && license === "Apache-2.0")
    texts.push("The text of its licence is that in LICENSE.");
  if (texts.length === 0)
    throw new Error(`${name} ${version} (${license}) is bundled, but has no text of a licence.`);
  const by = typeof author === "object" ? author?.name : author;
  const about = [`${name} ${version}`, by && `by ${by}`, `(${license})`, homepage].filter(Boolean).join(" ");
  return [about, ...texts.map((text) => text.trim())].join("\n\n");
}
