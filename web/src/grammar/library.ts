/** Loads @mlc-ai/web-xgrammar, which scripts/grammars.mjs makes into a module with its WebAssembly inside. */

import { later } from "../protocol/errors.js";

type Library = typeof import("@mlc-ai/web-xgrammar");

/** The library's last console output: its reason where it aborts. */
let said = "";

/** Loads the library. An aborted instance is useless afterwards: a new start gets another one. */
export async function loadLibrary(): Promise<Library> {
  const made = await later(() => import("@mlc-ai/web-xgrammar"), "its library");
  const { fresh } = made as unknown as { readonly fresh: () => Library };
  return fresh();
}

/** Runs `first`, the library's first action, which captures the console's functions. */
export async function listening<T>(first: () => Promise<T>): Promise<T> {
  const { error } = console;
  let isFirst = true;
  console.error = (...words: unknown[]) => {
    // Until then the output may be that of other code in this thread.
    if (isFirst) error.apply(console, words);
    else said = `${said}${words.join(" ")}\n`;
  };
  try {
    return await first();
  } finally {
    isFirst = false;
    console.error = error;
  }
}

/** The library's output since the last call, without the names of its files. */
export function reasonOf(error: unknown): string {
  const lines = said.split("\n").filter((line) => line !== "" && !line.startsWith("Aborted"));
  said = "";
  const line = lines.at(-1) ?? (error instanceof Error ? error.message : String(error));
  return line.replace(/^.*\.(cc|h):\d+: /, "").slice(0, 300);
}
