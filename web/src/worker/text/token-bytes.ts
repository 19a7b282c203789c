/**
 * Converts tokens to the bytes that they stand for.
 *
 * The library's own `decode` works on whole lists. Answers come token by token, and one character may span several
 * tokens, so the stream needs bytes, which a streaming TextDecoder then joins into characters. The rules below are
 * those of the decoders in tokenizer.json that causal language models use.
 */

import { ArtifactError } from "../../protocol/errors.js";
import { asObject, isObject, type JsonObject } from "./tokenizer-file.js";

/** The rules by which a tokenizer's tokens become text. */
export interface ByteRules {
  /** The bytes of a token; `first` says that no visible token came before it. */
  bytes(token: string, first: boolean): Uint8Array<ArrayBuffer>;
  /** Rules for the whole text, in the order in which they apply. */
  readonly after: readonly TextRule[];
}

/** A rule for a whole text: drops at most `count` of `char` at its start, or replaces a part everywhere. */
export type TextRule =
  | { readonly kind: "strip"; readonly char: string; readonly count: number }
  | { readonly kind: "replace"; readonly part: string; readonly by: string };

type Rewrite = (token: string, first: boolean) => string;

const encoder = new TextEncoder();

/**
 * GPT-2's printable characters for bytes: a printable Latin-1 character stands for its own byte, U+0100 onwards stand
 * for the other bytes in order.
 */
const BYTE_OF_CHAR: ReadonlyMap<string, number> = (() => {
  const map = new Map<string, number>();
  let next = 0x100;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    map.set(String.fromCharCode(printable ? byte : next++), byte);
  }
  return map;
})();

function byteLevelBytes(token: string): Uint8Array<ArrayBuffer> {
  const bytes: number[] = [];
  for (const char of token) {
    const byte = BYTE_OF_CHAR.get(char);
    // An added token is plain text and may hold characters that stand for no byte.
    if (byte === undefined) return encoder.encode(token);
    bytes.push(byte);
  }
  return Uint8Array.from(bytes);
}

const BYTE_TOKEN = /^<0x([0-9A-Fa-f]{2})>$/;

function plainBytes(rewrites: readonly Rewrite[], byteFallback: boolean): ByteRules["bytes"] {
  return (token, first) => {
    const byte = byteFallback ? BYTE_TOKEN.exec(token)?.[1] : undefined;
    if (byte !== undefined) return Uint8Array.of(Number.parseInt(byte, 16));
    return encoder.encode(rewrites.reduce((text, rewrite) => rewrite(text, first), token));
  };
}

function replaceRule(step: JsonObject): TextRule & { kind: "replace" } {
  const part = isObject(step.pattern) ? step.pattern.String : undefined;
  if (typeof part !== "string" || part === "" || typeof step.content !== "string") throw unsupported(step);
  return { kind: "replace", part, by: step.content };
}

function metaspaceRule(step: JsonObject): Rewrite {
  const mark = typeof step.replacement === "string" ? step.replacement : "▁";
  const prepended = step.prepend_scheme !== "never" && step.add_prefix_space !== false;
  return (token, first) => token.replaceAll(mark, first && prepended ? "" : " ");
}

/**
 * The rules of the `decoder` in a tokenizer.json. Throws if the decoder is of a kind that no supported model uses.
 */
export function byteRules(decoder: unknown): ByteRules {
  const root = asObject(decoder, "tokenizer.json: decoder");
  const steps: readonly unknown[] =
    root.type === "Sequence" && Array.isArray(root.decoders) ? root.decoders : [root];
  if (steps.some((step) => isObject(step) && step.type === "ByteLevel")) {
    if (steps.length > 1) throw unsupported(root);
    return { bytes: byteLevelBytes, after: [] };
  }
  const rewrites: Rewrite[] = [];
  const after: TextRule[] = [];
  let byteFallback = false;
  let fused = false;
  for (const entry of steps) {
    const step = asObject(entry, "tokenizer.json: decoder step");
    if (step.type === "Replace") {
      const rule = replaceRule(step);
      // Behind Fuse, the rule sees the whole text, and so also matches across the border of two tokens.
      if (fused) after.push(rule);
      else rewrites.push((token) => token.replaceAll(rule.part, () => rule.by));
    } else if (step.type === "Metaspace" && !fused) rewrites.push(metaspaceRule(step));
    else if (step.type === "ByteFallback") byteFallback = true;
    else if (step.type === "Fuse") fused = true;
    else if (step.type === "Strip" && fused && step.stop === 0 && typeof step.content === "string")
      after.push({ kind: "strip", char: step.content, count: Number(step.start ?? 0) });
    else throw unsupported(step);
  }
  return { bytes: plainBytes(rewrites, byteFallback), after };
}

function unsupported(step: JsonObject): ArtifactError {
  return new ArtifactError(
    `tokenizer.json: the decoder ${JSON.stringify(step)} is not supported; supported are ByteLevel, and ` +
      "sequences of Replace, Metaspace, ByteFallback, Fuse and Strip. Please report the model.",
  );
}
