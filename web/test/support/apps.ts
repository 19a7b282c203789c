import { cp, mkdir, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import type { Installed } from "./built.js";
import { WEB } from "./programs.js";

/** A copy of folders of web/apps, one over the other, beside the installed package. */
export async function copyApp({ root }: Installed, name: string, ...folders: string[]): Promise<string> {
  const app = join(root, name);
  const dependencies = { nearfar: "*" };
  await writeFiles(app, [["package.json", JSON.stringify({ name, type: "module", dependencies })]]);
  for (const folder of folders) await cp(join(WEB, "apps", folder), app, { recursive: true });
  return app;
}

export async function writeFiles(
  folder: string,
  files: Iterable<readonly [string, string | Uint8Array]>,
): Promise<void> {
  for (const [path, content] of files) {
    await mkdir(dirname(join(folder, path)), { recursive: true });
    await writeFile(join(folder, path), content);
  }
}
