import { mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join, relative } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { bundleNode } from "../../scripts/bundle.mjs";
import type * as node from "../../src/node/index.js";

/** nearfar/node as it is built, in a folder of its own. */
export interface NodePackage {
  readonly folder: string;
  /** The package's entry. */
  load(): Promise<typeof node>;
  remove(): Promise<void>;
}

const DIST = fileURLToPath(new URL("../../dist/node/", import.meta.url));

export async function nodePackage(): Promise<NodePackage> {
  const folder = await mkdtemp(join(tmpdir(), "nearfar-"));
  const { outputFiles } = await bundleNode({ write: false });
  for (const { path, contents } of outputFiles) {
    const place = join(folder, relative(DIST, path));
    await mkdir(dirname(place), { recursive: true });
    await writeFile(place, contents);
  }
  await writeFile(join(folder, "package.json"), '{"type": "module"}');
  return {
    folder,
    load: () => import(/* @vite-ignore */ pathToFileURL(join(folder, "index.js")).href),
    remove: () => rm(folder, { recursive: true, force: true }),
  };
}
