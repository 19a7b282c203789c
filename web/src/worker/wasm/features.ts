import type { Manifest, Program } from "../../artifact/manifest.js";
import { DeviceError } from "../../protocol/errors.js";
import { type ProgramWish, wantedPrograms } from "../device/wanted.js";

/** The feature that programs with threads need: their memory is shared. */
export const ATOMICS = "atomics";

/** The headers that give a page shared memory. */
export const ISOLATE =
  "Serve the page with the headers Cross-Origin-Opener-Policy: same-origin and " +
  "Cross-Origin-Embedder-Policy: require-corp, which make it cross-origin isolated.";

/** A module with one vector instruction: (func (result v128) i32.const 0 i8x16.splat i8x16.popcnt). */
const SIMD = [
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98,
  11,
];

/**
 * The WebAssembly features of this browser, by the names of `requires.features`. `threads` says whether
 * threads are available.
 */
export function wasmFeatures(threads: boolean): ReadonlySet<string> {
  const found = new Set<string>();
  if (typeof WebAssembly !== "object") return found;
  if (WebAssembly.validate(new Uint8Array(SIMD))) found.add("simd128");
  if (threads && typeof SharedArrayBuffer === "function") found.add(ATOMICS);
  return found;
}

/**
 * The first program that can run here; the build lists the program with threads first. `threads` is the
 * wanted number: one thread needs no shared memory. `wish` restricts the choice to programs with these
 * properties.
 */
export function ableProgram(
  { programs }: Pick<Manifest, "programs">,
  features: ReadonlySet<string>,
  threads: number,
  wish: ProgramWish = {},
): Program {
  const named = wantedPrograms(programs, wish);
  const lacks = ({ requires }: Program): string[] => requires.features.filter((name) => !features.has(name));
  const able = named.filter((program) => lacks(program).length === 0);
  const isPlain = ({ requires }: Program): boolean => !requires.features.includes(ATOMICS);
  const best = (threads === 1 ? able.find(isPlain) : undefined) ?? able[0];
  if (best) return best;
  const reasons = named.map((program) => `${program.name}: ${lacks(program).join(", ")}`);
  const onlyThreads = named.some((program) => lacks(program).every((name) => name === ATOMICS));
  const advice = onlyThreads ? ISOLATE : "Use a newer browser: Chrome 91+, Firefox 114+ or Safari 16.4+.";
  throw new DeviceError(
    `WebAssembly cannot run the model here, because it lacks ${reasons.join("; ")}. ${advice}`,
    { code: "device-unsuitable" },
  );
}
