/** @mlc-ai/web-xgrammar, with its WebAssembly inside, as scripts/grammars.mjs makes a module of it. */

import { later } from "../protocol/errors.js";

type Library = typeof import("@mlc-ai/web-xgrammar");

/** What the library wrote last to the console: its reason, where it aborts. */
let said = "";

/** Loads the library. One that aborts is no good afterwards: who begins anew has another. */
export async function loadLibrary(): Promise<Library> {
  const made = await later(() => import("@mlc-ai/web-xgrammar"), "its library");
  const { fresh } = made as unknown as { readonly fresh: () => Library };
  return fresh();
}

/** What the library does first: it keeps the console's functions as they are then. */
export async function listening<T>(first: () => Promise<T>): Promise<T> {
  const { error } = console;
  let isFirst = true;
  console.error = (...words: unknown[]) => {
    // Until then it may be anybody's of this thread.
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

/** What the library has said since, without the names of its files. */
export function reasonOf(error: unknown): string {
  const lines = said.split("\n").filter((line) => line !== "" && !line.startsWith("Aborted"));
  said = "";
  const line = lines.at(-1) ?? (error instanceof Error ? error.message : String(error));
  return line.replace(/^.*\.(cc|h):\d+: /, "").slice(0, 300);
}
