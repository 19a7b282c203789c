import { readdirSync, readFileSync } from "node:fs";
import { expect, test } from "vitest";

/** The imports that biome.json allows each room; biome checks the imports themselves. */
const { overrides } = JSON.parse(read("../biome.json")) as {
  readonly overrides: readonly {
    readonly includes: readonly [string];
    readonly linter: { readonly rules: { readonly style: { readonly noRestrictedImports: Rule } } };
  }[];
};
interface Rule {
  readonly options: { readonly patterns: readonly [{ readonly group: readonly string[] }] };
}
const LINTED = new Map(
  overrides.map(({ includes: [files], linter }) => {
    const [forbidden, ...allowed] = linter.rules.style.noRestrictedImports.options.patterns[0].group;
    expect(forbidden, files).toBe("../**");
    return [files.replace(/^\*\*\/(src\/)?|\/\*\*$/g, ""), allowed.map(nameOf).sort()];
  }),
);

function read(path: string): string {
  return readFileSync(new URL(path, import.meta.url), "utf8");
}

/** The last folder or module of a pattern or a path. */
function nameOf(path: string): string {
  return path.replace(/\/(\*\*)?$|\.(js|ts)$/g, "").replace(/.*\//, "");
}

function folders(path: string): string[] {
  const all = readdirSync(new URL(path, import.meta.url), { withFileTypes: true, recursive: true });
  const files = all.flatMap((each) => (each.isFile() ? [each.parentPath.split(path.slice(2))[1] ?? ""] : []));
  // A folder that git has emptied may still be there.
  return [...new Set(files.map((folder) => folder.split("/")[1] ?? ""))].filter((name) => name !== "");
}

test("each room has a rule of its own", () => {
  const rooms = [...folders("../src"), ...folders("../src/worker").map((name) => `worker/${name}`), "chat"];
  expect([...LINTED.keys()].sort()).toEqual(rooms.sort());
  // A pattern names a room by its last folder.
  const names = rooms.map(nameOf);
  expect(new Set(names).size).toBe(names.length);
});

test("the documentation has the same table", () => {
  const [, table = ""] = read("../../docs/architecture.md").split("### The rooms of web/");
  const rows = [...table.matchAll(/^\| `(?:web\/)?([\w/-]+)\/` \|.*\| ([^|]*) \|$/gm)];
  const told = rows.map(([, room = "", allowed = ""]): [string, string[]] => [
    room,
    [...allowed.matchAll(/`([^`]+)`/g)].map(([, path = ""]) => nameOf(path)).sort(),
  ]);
  expect(new Map(told)).toEqual(LINTED);
});
