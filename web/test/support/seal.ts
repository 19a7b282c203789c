import { createHash } from "node:crypto";

const BLANK = "0".repeat(64);

/** A manifest's text with its digest, as a build writes it (docs/artifact.md). */
export function seal(manifest: object): string {
  const text = `${JSON.stringify({ ...manifest, manifest_sha256: BLANK }, null, 1)}\n`;
  const at = text.lastIndexOf(BLANK);
  return text.slice(0, at) + createHash("sha256").update(text).digest("hex") + text.slice(at + 64);
}
