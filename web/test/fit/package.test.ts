import { execFileSync } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, posix, relative } from "node:path";
import { checkPackage, createPackageFromTarballData } from "@arethetypeswrong/core";
import { publint } from "publint";
import { formatMessage } from "publint/utils";
import ts from "typescript";
import { beforeAll, expect, test } from "vitest";
import { type Installed, installPackage } from "../support/built.js";
import { WEB } from "../support/programs.js";

/** The package that npm publishes, as its users install it. */
const PATIENCE_MS = 240_000;
interface Manifest {
  readonly exports: Readonly<Record<string, string | { readonly types: string }>>;
  readonly dependencies?: object;
}
let installed: Installed;
let manifest: Manifest;
let files: readonly string[];

beforeAll(async () => {
  installed = await installPackage();
  const { folder } = installed;
  manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as Manifest;
  files = (readdirSync(folder, { recursive: true }) as string[]).map((path) => path.replaceAll("\\", "/"));
}, PATIENCE_MS);

const textOf = (path: string): string => readFileSync(join(installed.folder, path), "utf8");

test("publint finds nothing", async () => {
  const { messages } = await publint({ pkgDir: installed.folder, pack: false, strict: true });
  const pkg = manifest as unknown as Record<string, unknown>;
  expect(messages.map((message) => formatMessage(message, pkg))).toEqual([]);
});

test("every entry has its types, by each way TypeScript finds modules", {
  timeout: PATIENCE_MS,
}, async () => {
  const tarball = createPackageFromTarballData(readFileSync(installed.tarball));
  const analysis = await checkPackage(tarball);
  if (!analysis.types) throw new Error("attw finds no types");
  // CommonJS is not offered: Node 20.19 and newer `require` modules too. node10 knows no `exports`.
  const told = analysis.problems.filter(
    (problem) =>
      problem.kind !== "CJSResolvesToESM" &&
      !("resolutionKind" in problem && problem.resolutionKind === "node10" && problem.entrypoint !== "."),
  );
  expect(told).toEqual([]);
  expect(Object.keys(analysis.entrypoints)).toEqual(Object.keys(manifest.exports));
});

test.each([
  { name: "bundler, ES2020", module: ts.ModuleKind.ESNext, resolution: ts.ModuleResolutionKind.Bundler },
  { name: "node16, ES2020", module: ts.ModuleKind.Node16, resolution: ts.ModuleResolutionKind.Node16 },
])("the types hold to the strictest checks: $name", { timeout: PATIENCE_MS }, ({ module, resolution }) => {
  const entries = Object.entries(manifest.exports).filter(([, target]) => typeof target === "object");
  const source = entries.map(([entry], at) => `export * as entry${at} from "nearfar${entry.slice(1)}";`);
  const path = join(installed.root, "entries.mts");
  const options: ts.CompilerOptions = {
    target: ts.ScriptTarget.ES2020,
    lib: ["lib.es2020.d.ts", "lib.dom.d.ts"],
    module,
    moduleResolution: resolution,
    types: ["react"],
    strict: true,
    exactOptionalPropertyTypes: true,
    noUncheckedIndexedAccess: true,
    skipLibCheck: false,
    noEmit: true,
  };
  const host = ts.createCompilerHost(options);
  const { getSourceFile, fileExists, readFile } = host;
  host.fileExists = (asked) => asked === path || fileExists(asked);
  host.readFile = (asked) => (asked === path ? source.join("\n") : readFile(asked));
  host.getSourceFile = (asked, version) =>
    asked === path ? ts.createSourceFile(asked, source.join("\n"), version) : getSourceFile(asked, version);
  const program = ts.createProgram([path], options, host);
  const ours = program
    .getSourceFiles()
    .filter(({ fileName }) => fileName === path || fileName.startsWith(installed.folder));
  expect(ours.length).toBeGreaterThan(entries.length);
  const found = ours.flatMap((file) => [
    ...program.getSyntacticDiagnostics(file),
    ...program.getSemanticDiagnostics(file),
  ]);
  const told = found.map(
    ({ file, messageText }) =>
      `${relative(installed.root, file?.fileName ?? "")}: ${ts.flattenDiagnosticMessageText(messageText, "\n")}`,
  );
  expect(told).toEqual([]);
});

test("it holds what it should, and nothing else", () => {
  expect(manifest.dependencies).toBeUndefined();
  const top = new Set(files.map((path) => path.split("/")[0]));
  expect([...top].sort()).toEqual(["LICENSE", "README.md", "dist", "docs", "package.json"]);
  expect(files.filter((path) => /^dist\/(page|meta\.json)/.test(path))).toEqual([]);
  expect(textOf("LICENSE")).toBe(readFileSync(join(WEB, "../LICENSE"), "utf8"));
});

test("it has the licences of all that is bundled", () => {
  const notices = textOf("dist/NOTICES.txt");
  const maps = files.filter((path) => path.endsWith(".js.map"));
  const sources = maps.flatMap((path) => (JSON.parse(textOf(path)) as { sources: string[] }).sources);
  const bundled = sources.flatMap((path) => /.*node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1] ?? []);
  expect(bundled.length).toBeGreaterThan(0);
  for (const name of new Set(bundled)) expect(notices).toContain(`\n${name} `);
});

test("its types import nothing that is not installed with it", () => {
  const types = files.filter((path) => path.endsWith(".d.ts"));
  const imported = types.flatMap((path) =>
    [...textOf(path).matchAll(/(?:from|import\()\s*["']([^."'][^"']*)["']/g)].map(([, name]) => name ?? ""),
  );
  expect([...new Set(imported)].sort()).toEqual(["@ai-sdk/provider"]);
});

test("its pages refer to nothing outside, and show the apps as they are tested", () => {
  const pages = files.filter((path) => path.endsWith(".md"));
  const apps = new Set<string>();
  for (const page of pages) {
    const text = textOf(page);
    for (const [, target = ""] of text.matchAll(/\]\((?!https?:|#)([^)#]+)[^)]*\)/g))
      expect(files, `${page} refers to ${target}`).toContain(posix.join(dirname(page), target));
    for (const [, path = "", shown] of text.matchAll(/^```\w+ (\S+)\n(.*?)^```$/gms)) {
      expect(shown, `${path} in ${page}`).toBe(readFileSync(join(WEB, "apps", path), "utf8"));
      apps.add(path.split("/")[0] ?? "");
    }
  }
  expect([...apps].sort()).toEqual(readdirSync(join(WEB, "apps")).sort());
});

test("its API reference has no broken link and no undocumented export", { timeout: PATIENCE_MS }, () => {
  // `npm run check` checks the types of the sources, in half of this test's time.
  const options = ["--emit", "none", "--skipErrorChecking"];
  execFileSync(process.execPath, [join(WEB, "node_modules/typedoc/bin/typedoc"), ...options], {
    cwd: WEB,
    stdio: "pipe",
  });
});
