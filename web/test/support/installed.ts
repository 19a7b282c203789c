import { execFile } from "node:child_process";
import { cp, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { buildPackage } from "../../scripts/build.mjs";

export const WEB = fileURLToPath(new URL("../..", import.meta.url));

/** What runs here as a program of its own; rejects with what it printed. */
export async function run(
  command: string,
  args: readonly string[],
  cwd: string,
  more: Readonly<Record<string, string>> = {},
): Promise<string> {
  const env = { ...process.env, NEXT_TELEMETRY_DISABLED: "1", NO_COLOR: "1", ...more };
  const done = promisify(execFile)(command, [...args], { cwd, env, maxBuffer: 1 << 26 });
  const { stdout } = await done.catch((error: Error & { stdout: string; stderr: string }) => {
    throw new Error(`${error.message}\n${error.stdout}\n${error.stderr}`);
  });
  return stdout;
}

/** The package as npm publishes and installs it, in a place where apps find it and web/'s own packages. */
export interface Installed {
  readonly root: string;
  /** What `npm pack` made. */
  readonly tarball: string;
  /** The package's folder, in node_modules. */
  readonly folder: string;
  remove(): Promise<void>;
}

export async function installPackage(): Promise<Installed> {
  await mkdir(join(WEB, "out"), { recursive: true });
  const root = await mkdtemp(join(WEB, "out/apps-"));
  const staged = join(root, "staged");
  await mkdir(staged);
  await Promise.all([
    buildPackage(staged),
    ...["package.json", "README.md", "docs"].map((path) =>
      cp(join(WEB, path), join(staged, path), { recursive: true }),
    ),
  ]);
  const packed = await run("npm", ["pack", "--ignore-scripts", "--json", "--pack-destination", root], staged);
  const [{ filename }] = JSON.parse(packed) as [{ filename: string }];
  const tarball = join(root, filename);
  // Without a name of its own this folder would be a part of web/, whose name is the package's.
  await writeFiles(root, [["package.json", JSON.stringify({ name: "apps", private: true })]]);
  const folder = join(root, "node_modules/nearfar");
  await mkdir(folder, { recursive: true });
  await run("tar", ["-xzf", tarball, "--strip-components=1", "-C", folder], root);
  await rm(staged, { recursive: true });
  return { root, tarball, folder, remove: () => rm(root, { recursive: true, force: true }) };
}

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
