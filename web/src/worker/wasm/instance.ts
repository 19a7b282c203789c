import type { Program } from "../../artifact/manifest.js";
import { ArtifactError, DeviceError, namedMessage } from "../../protocol/errors.js";
import type { ReadFile } from "../store/packs.js";

/** The exports of the module (docs/wasm.md). Addresses are signed numbers. */
export interface Exports {
  readonly nf_kernels: WebAssembly.Global;
  readonly __stack_pointer: WebAssembly.Global;
  nf_pool_new(threads: number, cores: number): number;
  nf_pool_free(pool: number): void;
  nf_replay(pool: number, launches: number, n: number): number;
  nf_error(): number;
}

const POLICY =
  "The page's Content-Security-Policy must have 'wasm-unsafe-eval' in script-src; nothing needs " +
  "'unsafe-eval'.";

/** A program's module, verified and compiled. */
export async function loadModule({ name, library }: Program, read: ReadFile): Promise<WebAssembly.Module> {
  if (!library) throw new ArtifactError(`The program ${name} has no library. Build the artifact again.`);
  // The module is not compiled while it streams in, so that nothing is compiled before its digest is checked
  // against the manifest.
  const bytes = await read(library);
  try {
    return await WebAssembly.compile(bytes);
  } catch (cause) {
    throw new DeviceError(
      `${library.file} cannot be compiled here (${namedMessage(cause)}). ${POLICY} Or use a newer browser.`,
      { code: "device-unsuitable", cause },
    );
  }
}

export async function instantiate(module: WebAssembly.Module, memory: WebAssembly.Memory): Promise<Exports> {
  try {
    const { exports } = await WebAssembly.instantiate(module, { env: { memory } });
    return exports as unknown as Exports;
  } catch (cause) {
    throw new DeviceError(`The WebAssembly module does not start here: ${namedMessage(cause)}.`, {
      code: "device-unsuitable",
      cause,
    });
  }
}

/** The number that stands for each kernel in a launch. */
export function kernelsOf(
  { nf_kernels }: Exports,
  { buffer }: WebAssembly.Memory,
  { name, routines }: Program,
): Map<string, number> {
  const at = (nf_kernels.value as number) >>> 0;
  const names = [...routines.keys()].sort();
  const found = new Uint32Array(buffer, at, names.length + 1);
  if (found[names.length] !== 0 || found.subarray(0, -1).includes(0))
    throw new ArtifactError(
      `The module of the program ${name} does not have the ${names.length} kernels that manifest.json lists. ` +
        "Build the artifact again.",
    );
  return new Map(names.map((kernel, i) => [kernel, found[i] ?? 0]));
}

/** The text of the last error. */
export function errorOf({ nf_error }: Exports, { buffer }: WebAssembly.Memory): string {
  const at = nf_error() >>> 0;
  const bytes = new Uint8Array(buffer, at);
  // The bytes are copied, because a decoder accepts no shared memory.
  return new TextDecoder().decode(bytes.slice(0, Math.max(bytes.indexOf(0), 0)));
}
