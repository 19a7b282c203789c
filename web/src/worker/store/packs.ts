import { parseJson } from "../../artifact/json.js";
import type { Manifest, PackEntry } from "../../artifact/manifest.js";
import { ArtifactError } from "../../protocol/errors.js";
import { sha256Hex } from "../../storage/http.js";
import { type KeptOptions, keptBytes, type Wanted } from "./kept-file.js";

/** Reads a file of an artifact and verifies it. */
export type ReadFile = (wanted: Wanted) => Promise<Uint8Array<ArrayBuffer>>;

/**
 * Opens the files of a program, or, for null, of the tokenizer. They come from their bundle file, which is
 * requested at once. They come one by one if there is none (older artifacts) or the browser cannot decompress
 * it.
 */
export async function openFiles(
  base: URL,
  { packs }: Pick<Manifest, "packs">,
  program: string | null,
  options: KeptOptions,
): Promise<ReadFile> {
  const single: ReadFile = (wanted) => keptBytes(base, wanted, options);
  const pack = packs.find((each) => each.program === program);
  if (!pack || !("DecompressionStream" in globalThis)) return single;
  const files = await unpack(pack, await keptBytes(base, pack, options));
  return async (wanted) => {
    const bytes = files.get(wanted.file);
    if (!bytes) return single(wanted);
    if ((await sha256Hex(bytes)) !== wanted.sha256)
      throw new ArtifactError(`${pack.file} holds another ${wanted.file}. Build the artifact again.`);
    return bytes;
  };
}

/**
 * Unpacks a bundle file: zlib's format of a line of JSON, [[file, bytes], …], with the files' bytes behind
 * it.
 */
async function unpack(
  { file }: PackEntry,
  pack: Uint8Array<ArrayBuffer>,
): Promise<Map<string, Uint8Array<ArrayBuffer>>> {
  const stream = new Blob([pack]).stream().pipeThrough(new DecompressionStream("deflate"));
  const content = new Uint8Array(
    await new Response(stream).arrayBuffer().catch((cause: unknown) => {
      throw new ArtifactError(`${file} cannot be unpacked. Build the artifact again.`, { cause });
    }),
  );
  let at = content.indexOf("\n".charCodeAt(0)) + 1;
  const index = new TextDecoder().decode(content.subarray(0, at));
  const entries = parseJson<(readonly [string, number])[]>(index, file).list((entry) => {
    const [name, bytes] = entry.list((item) => item);
    const size = bytes?.int() ?? 0;
    at += size;
    return [String(name?.value), content.slice(at - size, at)] as const;
  });
  if (at !== content.length)
    throw new ArtifactError(`${file} has ${content.length} bytes, and its files ${at}. Build it again.`);
  return new Map(entries);
}
