/** The card at the side: which model this is. */

import type { Manifest } from "../src/both/manifest.js";
import { element } from "./dom.js";
import { formatBytes, formatCount } from "./format.js";

export function showModel(manifest: Manifest): void {
  const { model, weights, license } = manifest;
  document.title = `${model.name} · nearfar`;
  element("model-name", HTMLHeadingElement).textContent = model.name;
  element("model-summary", HTMLParagraphElement).textContent = "Runs here, in the browser, through WebGPU";
  const facts: readonly (readonly [string, string])[] = [
    ["Architecture", model.architecture],
    ["Quantisation", manifest.quantization],
    ["Download", formatBytes(weights.bytes)],
    ["Context", `${formatCount(model.contextLength)} tokens`],
    ["Vocabulary", `${formatCount(model.vocabSize)} tokens`],
    ["Licence", license ?? "not stated"],
  ];
  element("model-facts", HTMLElement).replaceChildren(
    ...facts.flatMap(([name, value]) => {
      const term = document.createElement("dt");
      const description = document.createElement("dd");
      term.textContent = name;
      description.textContent = value;
      return [term, description];
    }),
  );
}

/** Says what the loaded model runs on. */
export function showDevice(runsOn: string): void {
  element("model-summary", HTMLParagraphElement).textContent = `Runs in ${runsOn}`;
}
