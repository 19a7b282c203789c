import { readFileSync } from "node:fs";
import { join, relative } from "node:path";
import ts from "typescript";
import { beforeAll, expect, test } from "vitest";
import { type Installed, installPackage } from "../support/built.js";
import { WEB } from "../support/programs.js";

/**
 * The TypeScript of pages against the declarations of the package as it is installed, both as strictly as an
 * app may check: exactOptionalPropertyTypes, without skipLibCheck.
 */
const PATIENCE_MS = 240_000;
const PAGES = ["docs/clients.md", "README.md", "../README.md", "../docs/web.md", "../docs/routing.md"].map(
  (path) => readFileSync(join(WEB, path), "utf8"),
);
let installed: Installed;
beforeAll(async () => {
  installed = await installPackage();
}, PATIENCE_MS);

const OPTIONS: ts.CompilerOptions = {
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
  lib: ["lib.es2023.d.ts", "lib.dom.d.ts", "lib.dom.iterable.d.ts", "lib.dom.asynciterable.d.ts"],
  types: ["@webgpu/types", "node", "react"],
  jsx: ts.JsxEmit.ReactJSX,
  strict: true,
  noUncheckedIndexedAccess: true,
  exactOptionalPropertyTypes: true,
  verbatimModuleSyntax: true,
  skipLibCheck: false,
  noEmit: true,
};

/** A compiler host that also has files in memory. */
function hostOf(files: ReadonlyMap<string, string>): ts.CompilerHost {
  const host = ts.createCompilerHost(OPTIONS);
  const { fileExists, readFile, getSourceFile } = host;
  host.getCurrentDirectory = () => installed.root;
  host.fileExists = (path) => files.has(path) || fileExists(path);
  host.readFile = (path) => files.get(path) ?? readFile(path);
  host.getSourceFile = (path, version) => {
    const text = files.get(path);
    return text === undefined ? getSourceFile(path, version) : ts.createSourceFile(path, text, version);
  };
  return host;
}

test("the snippets and the declarations hold to the strictest checks", { timeout: PATIENCE_MS }, () => {
  const { root, folder } = installed;
  const { exports } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as {
    exports: Record<string, { types?: string }>;
  };
  const snippets = PAGES.flatMap((page) => [...page.matchAll(/^```(tsx?)\n(.*?)^```/gms)]).map(
    ([, kind, text], at): [string, string] => [join(root, `snippet-${at}.${kind}`), `${text}export {};\n`],
  );
  expect(snippets.length).toBeGreaterThan(5);
  const entries = Object.keys(exports).filter((entry) => exports[entry]?.types);
  const imports = entries.map((entry, at) => `export * as entry${at} from "nearfar${entry.slice(1)}";`);
  const files = new Map([...snippets, [join(root, "entries.ts"), imports.join("\n")]]);
  const program = ts.createProgram([...files.keys()], OPTIONS, hostOf(files));
  const ours = program
    .getSourceFiles()
    .filter(({ fileName }) => files.has(fileName) || fileName.startsWith(folder));
  const found = ours.flatMap((file) => [
    ...program.getSyntacticDiagnostics(file),
    ...program.getSemanticDiagnostics(file),
  ]);
  const told = found.map(({ file, start, messageText }) => {
    const { line } = file?.getLineAndCharacterOfPosition(start ?? 0) ?? { line: 0 };
    const where = `${relative(root, file?.fileName ?? "")}:${line + 1}`;
    return `${where} ${ts.flattenDiagnosticMessageText(messageText, "\n")}`;
  });
  expect(told).toEqual([]);
  // Only the package's own declarations were checked, those of each entry, and no sources.
  const checked = ours.map(({ fileName }) => relative(root, fileName));
  for (const entry of entries)
    expect(checked).toContain(join("node_modules/nearfar", exports[entry]?.types ?? ""));
  expect(program.getSourceFiles().filter(({ fileName }) => fileName.startsWith(join(WEB, "src/")))).toEqual(
    [],
  );
});
