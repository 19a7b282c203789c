/**
 * Recognizes a quotation of a text anywhere, by comparing windows of its letters. Python picks the same
 * windows (quotes.py explains how).
 */

/** Bytes of a window: nothing shorter counts as a quotation. */
export const WINDOW = 32;
/** Number of consecutive windows of which one is picked. */
const RUN = 8;

const ESCAPES = /\\+(?:u([0-9a-fA-F]{4})|[nrtbf])?|&(?:amp|lt|gt|quot|apos|nbsp|#0*39|#[xX]0*27);/g;
const FACTOR = 0x9e3779b1;
/** FACTOR to the power of a window, modulo 2^32: the weight of the byte that leaves a window. */
const LEAVING = Array.from({ length: WINDOW }).reduce<number>((made) => Math.imul(made, FACTOR), 1);

/**
 * The letters and digits of a text as UTF-8. Blanks, line breaks, quote and Markdown signs, and escapes of
 * JSON and HTML are removed, and ASCII capitals lowered.
 */
export function letters(text: string): Uint8Array {
  const plain = text.replace(ESCAPES, (_, hex: string | undefined) =>
    hex ? String.fromCharCode(Number.parseInt(hex, 16)) : " ",
  );
  const bytes = new TextEncoder().encode(plain.normalize("NFKC").replace(/[^\p{L}\p{N}]+/gu, ""));
  return bytes.map((byte) => (byte >= 65 && byte <= 90 ? byte + 32 : byte));
}

/** Positions of the picked windows in the bytes from `letters`; none where they are shorter than a window. */
export function windows(data: Uint8Array): number[] {
  const hashes = windowHashes(data);
  const run = Math.min(RUN, hashes.length);
  const least = new Set<number>();
  for (let at = 0; at + run <= hashes.length && run > 0; at++)
    least.add(Math.min(...hashes.subarray(at, at + run)));
  return [...hashes.keys()].filter((at) => least.has(hashes[at] ?? 0));
}

/** Each window's polynomial hash, modulo 2^32, mixed by MurmurHash3's finalizer. */
function windowHashes(data: Uint8Array): Uint32Array {
  const made = new Uint32Array(Math.max(data.length - WINDOW + 1, 0));
  let value = 0;
  for (let at = 0; at < data.length; at++) {
    value = (Math.imul(value, FACTOR) + (data[at] ?? 0)) | 0;
    if (at >= WINDOW) value = (value - Math.imul(LEAVING, data[at - WINDOW] ?? 0)) | 0;
    if (at >= WINDOW - 1) made[at - WINDOW + 1] = mixed(value);
  }
  return made;
}

function mixed(value: number): number {
  const once = Math.imul(value ^ (value >>> 16), 0x85ebca6b);
  const twice = Math.imul(once ^ (once >>> 13), 0xc2b2ae35);
  return twice ^ (twice >>> 16);
}
