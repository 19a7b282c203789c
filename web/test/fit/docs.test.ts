import { readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { expect, test } from "vitest";

/**
 * The TypeScript of pages against the declarations that the package would have, both as strictly as an
 * app may check: exactOptionalPropertyTypes, without skipLibCheck.
 */
const ROOT = fileURLToPath(new URL("../../", import.meta.url));
const PAGES = ["docs/clients.md", "README.md", "../README.md", "../docs/web.md", "../docs/routing.md"].map(
  (path) => readFileSync(join(ROOT, path), "utf8"),
);
const { exports } = JSON.parse(readFileSync(join(ROOT, "package.json"), "utf8")) as {
  exports: Record<string, { types?: string }>;
};

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
};

/** A host that knows files in memory too. */
function hostOf(files: ReadonlyMap<string, string>, options: ts.CompilerOptions): ts.CompilerHost {
  const host = ts.createCompilerHost(options);
  const { fileExists, readFile, directoryExists } = host;
  host.fileExists = (path) => files.has(path) || fileExists(path);
  host.directoryExists = (path) =>
    [...files.keys()].some((file) => file.startsWith(`${path}/`)) || (directoryExists?.(path) ?? true);
  host.readFile = (path) => files.get(path) ?? readFile(path);
  host.getSourceFile = (path, version) => {
    const text = host.readFile(path);
    return text === undefined ? undefined : ts.createSourceFile(path, text, version);
  };
  return host;
}

/** The declarations of all entries, by their paths under dist/types. */
function declarations(): Map<string, string> {
  const files = new Map<string, string>();
  const sources = Object.values(exports)
    .flatMap(({ types }) => types ?? [])
    .map((path) => join(ROOT, path.replace("./dist/types/", "src/").replace(/\.d\.ts$/, ".ts")));
  const options = {
    ...OPTIONS,
    declaration: true,
    emitDeclarationOnly: true,
    skipLibCheck: true,
    rootDir: join(ROOT, "src"),
    outDir: join(ROOT, "dist/types"),
  };
  const program = ts.createProgram(sources, options);
  program.emit(undefined, (path, text) => files.set(path, text));
  return files;
}

test("the snippets and the declarations hold to the strictest checks", { timeout: 120_000 }, () => {
  const files = declarations();
  const snippets = PAGES.flatMap((page) => [...page.matchAll(/^```(tsx?)\n(.*?)^```/gms)]).map(
    ([, kind, text], at): [string, string] => [join(ROOT, `snippet-${at}.${kind}`), `${text}export {};\n`],
  );
  expect(snippets.length).toBeGreaterThan(5);
  for (const [path, text] of snippets) files.set(path, text);
  const paths = Object.fromEntries(
    Object.entries(exports).flatMap(([entry, { types }]) =>
      types ? [[`nearfar${entry.slice(1)}`, [join(ROOT, types)]]] : [],
    ),
  );
  const options = { ...OPTIONS, noEmit: true, skipLibCheck: false, paths };
  const imports = Object.keys(paths).map((name, at) => `export * as entry${at} from "${name}";`);
  files.set(join(ROOT, "entries.ts"), imports.join("\n"));
  const roots = [...snippets.map(([path]) => path), join(ROOT, "entries.ts")];
  const program = ts.createProgram(roots, options, hostOf(files, options));
  const found = [...files.keys()].flatMap((path) => {
    const file = program.getSourceFile(path);
    if (!file) return [];
    return [...program.getSyntacticDiagnostics(file), ...program.getSemanticDiagnostics(file)];
  });
  const told = found.map(({ file, start, messageText }) => {
    const { line } = file?.getLineAndCharacterOfPosition(start ?? 0) ?? { line: 0 };
    const where = `${relative(ROOT, file?.fileName ?? "")}:${line + 1}`;
    return `${where} ${ts.flattenDiagnosticMessageText(messageText, "\n")}`;
  });
  expect(told).toEqual([]);
  // Declarations were what was checked, not sources.
  const checked = program.getSourceFiles().map(({ fileName }) => relative(ROOT, fileName));
  expect(checked).toContain("dist/types/react/index.d.ts");
  expect(checked.filter((path) => path.startsWith("src/"))).toEqual([]);
});
