/** The current package, built once in a run for all test files that ask for it (builder.ts). */

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { inject } from "vitest";

declare module "vitest" {
  interface ProvidedContext {
    /** The address of the process that builds. */
    builder: string;
  }
}

/** The parts of the package that run: package.json, and dist/ without declarations. */
export interface Built {
  readonly folder: string;
}

/** The package as npm publishes and installs it, in a place where apps find it and web/'s own packages. */
export interface Installed {
  /** The folder for apps, each in a folder of its own name. */
  readonly root: string;
  /** The file that `npm pack` made. */
  readonly tarball: string;
  /** The package's folder, in node_modules. */
  readonly folder: string;
}

export type Product = "scripts" | "installed";

// Tests replace the global `fetch`.
const { fetch } = globalThis;

async function ask<T>(product: Product): Promise<T> {
  const response = await fetch(new URL(product, inject("builder")));
  if (!response.ok) throw new Error(`the package cannot be built: ${await response.text()}`);
  return (await response.json()) as T;
}

let scripts: Promise<Built> | null = null;

/** Builds the package's scripts alone, which takes a second; they lie where no packages of web/ are found. */
export function builtPackage(): Promise<Built> {
  scripts ??= ask("scripts");
  return scripts;
}

/** Installs the package with npm: this takes ten seconds more, for the compiler and npm. */
export function installPackage(): Promise<Installed> {
  return ask("installed");
}

/** A file of the built package by its path under dist/; null if there is none. */
export async function distFile(path: string): Promise<Uint8Array | null> {
  if (!path.startsWith("dist/")) return null;
  return readFile(join((await builtPackage()).folder, path)).catch(() => null);
}
