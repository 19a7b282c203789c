/**
 * vitest's global set-up: builds the package at most once in a run, when the first file of tests asks for it
 * (built.ts). Files of tests run in processes of their own, so they ask by HTTP.
 */

import { cp, mkdir, mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { TestProject } from "vitest/node";
import type { Built, Installed, Product } from "./built.js";
import { run, WEB } from "./programs.js";

class Builder {
  readonly #folders: string[] = [];
  #scripts: Promise<Built> | null = null;
  #installed: Promise<Installed> | null = null;

  /** Builds a product once: later calls get the same promise. */
  make(product: Product): Promise<Built | Installed> {
    this.#scripts ??= this.#buildScripts();
    if (product === "scripts") return this.#scripts;
    this.#installed ??= this.#install(this.#scripts);
    return this.#installed;
  }

  async close(): Promise<void> {
    await Promise.allSettled([this.#scripts, this.#installed]);
    for (const folder of this.#folders) await rm(folder, { recursive: true, force: true });
  }

  async #folder(within: string, prefix: string): Promise<string> {
    await mkdir(within, { recursive: true });
    const made = await mkdtemp(join(within, prefix));
    this.#folders.push(made);
    return made;
  }

  /** Builds outside the repository, because bundles must not depend on the repository's packages. */
  async #buildScripts(): Promise<Built> {
    const folder = await this.#folder(tmpdir(), "nearfar-");
    // Only runs that build load the build script.
    const { buildScripts } = await import("../../scripts/build.mjs");
    await Promise.all([buildScripts(folder), cp(join(WEB, "package.json"), join(folder, "package.json"))]);
    return { folder };
  }

  async #install(scripts: Promise<Built>): Promise<Installed> {
    const root = await this.#folder(join(WEB, "out"), "apps-");
    const staged = join(root, "staged");
    await mkdir(staged);
    const { buildTypes } = await import("../../scripts/build.mjs");
    await Promise.all([
      // `npm run check` checks the types of the sources; without that, compiling takes half the time.
      buildTypes(join(staged, "dist/types"), "--noCheck"),
      scripts.then(({ folder }) => cp(folder, staged, { recursive: true })),
      ...["README.md", "docs"].map((path) => cp(join(WEB, path), join(staged, path), { recursive: true })),
    ]);
    const packed = await run(
      "npm",
      ["pack", "--ignore-scripts", "--json", "--pack-destination", root],
      staged,
    );
    const [{ filename }] = JSON.parse(packed) as [{ filename: string }];
    const tarball = join(root, filename);
    // Without its own name this folder would be part of web/, which has the package's name.
    await writeFile(join(root, "package.json"), JSON.stringify({ name: "apps", private: true }));
    const folder = join(root, "node_modules/nearfar");
    await mkdir(folder, { recursive: true });
    await run("tar", ["-xzf", tarball, "--strip-components=1", "-C", folder], root);
    await rm(staged, { recursive: true });
    return { root, tarball, folder };
  }
}

export default async function start(project: TestProject): Promise<() => Promise<void>> {
  const builder = new Builder();
  const server = createServer((request, response) => {
    builder.make(request.url === "/installed" ? "installed" : "scripts").then(
      (made) => response.end(JSON.stringify(made)),
      (error) => response.writeHead(500).end(String(error)),
    );
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  project.provide("builder", `http://127.0.0.1:${(server.address() as AddressInfo).port}/`);
  return async () => {
    server.closeAllConnections();
    server.close();
    await builder.close();
  };
}
