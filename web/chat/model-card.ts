/** The card at the side: which model this is. */

import type { Manifest } from "../src/artifact/manifest.js";
import type { ProgramChoice } from "../src/page/index.js";
import { element } from "./dom.js";
import { formatBytes, formatCount, formatMilliseconds } from "./format.js";

export function showModel(manifest: Manifest): void {
  const { model, weights, tokenizerFiles, license } = manifest;
  const bytes = tokenizerFiles.reduce((sum, file) => sum + file.bytes, weights.bytes);
  document.title = `${model.name} · nearfar`;
  element("model-name", HTMLHeadingElement).textContent = model.name;
  element("model-summary", HTMLParagraphElement).textContent = "Runs here, in the browser";
  const facts: readonly (readonly [string, string])[] = [
    ["Architecture", model.architecture],
    ["Quantisation", manifest.quantization],
    ["Download", formatBytes(bytes)],
    ["Context", `${formatCount(model.contextLength)} tokens`],
    ["Vocabulary", `${formatCount(model.vocabSize)} tokens`],
    ["Licence", license ?? "not stated"],
  ];
  element("model-facts", HTMLElement).replaceChildren(...facts.flatMap(rowOf));
}

function rowOf([name, value]: readonly [string, string]): HTMLElement[] {
  const term = document.createElement("dt");
  const description = document.createElement("dd");
  term.textContent = name;
  description.textContent = value;
  return [term, description];
}

/** Says what the loaded model runs on. */
export function showDevice(runsOn: string): void {
  element("model-summary", HTMLParagraphElement).textContent = `Runs in ${runsOn}`;
}

const REASONS: Readonly<Record<Exclude<ProgramChoice["why"], "only">, string>> = {
  pinned: "as requested",
  software: "this is a software GPU",
  timed: "timed just now",
  kept: "timed at an earlier visit",
  slow: "this GPU is too slow for trials",
  busy: "another tab is trying programs",
  offline: "the files of the others cannot be loaded now",
};

/** Says which program of the artifact runs, and why it is that one. */
export function showProgram(program: string, { why, measured }: ProgramChoice): void {
  const times = Object.entries(measured).map(([name, { decode }]) => `${name} ${formatMilliseconds(decode)}`);
  const reasons = why === "only" ? [] : [REASONS[why]];
  const told = [program, ...reasons, ...(times.length > 0 ? [`a token takes ${times.join(", ")}`] : [])];
  element("model-facts", HTMLElement).append(...rowOf(["Program", told.join("; ")]));
}
