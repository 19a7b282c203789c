/** Shows the progress while the model loads, and when it loads again. */

import type { LoadProgress } from "../src/page/index.js";
import { element } from "./dom.js";
import { formatBytes } from "./format.js";

export class Loading {
  readonly #box = element("loading", HTMLElement);
  readonly #stats = element("stats", HTMLOutputElement);
  readonly #bar = element("progress", HTMLProgressElement);

  constructor(private readonly state: () => "loading" | "ready" | "answering") {}

  hide(): void {
    this.#box.hidden = true;
  }

  show(progress: LoadProgress): void {
    if (progress.fraction !== undefined) this.#bar.value = progress.fraction;
    switch (progress.phase) {
      case "kernels":
        this.#showKernels(progress);
        return;
      case "prompt":
        this.#showPrompt(progress);
        return;
      case "trying":
        this.#tell("Finding out what runs best on this GPU", `Trying ${progress.program}`);
        return;
      case "program":
        this.#tell("Preparing the model", "");
        return;
      case "weights":
        this.#showWeights(progress);
        return;
      case "reopening":
        // A model that is ready has no other place to show this.
        this.#stats.textContent = "The device is being reopened: loading the model again";
        return;
      case "reopened":
        this.#stats.textContent = "";
    }
  }

  #showWeights({ loaded, cached, total }: Extract<LoadProgress, { phase: "weights" }>): void {
    const whence = cached > 0 ? `, ${formatBytes(cached)} of them kept from the last visit` : "";
    const text = `${formatBytes(loaded)} of ${formatBytes(total)}${whence}`;
    if (this.state() !== "loading") {
      this.#stats.textContent = `Loading the model again: ${text}`;
      return;
    }
    this.#tell(loaded < total ? "Loading the model" : "Preparing the model", text);
  }

  /**
   * Shows the compilation of kernels, while the model loads or while an answer waits for a new size of
   * kernels.
   */
  #showKernels({ compiled, total }: Extract<LoadProgress, { phase: "kernels" }>): void {
    const text = compiled < total ? `Compiling kernels: ${compiled} of ${total}` : "";
    const state = this.state();
    if (state === "answering") this.#stats.textContent = text || "Reading the prompt";
    else if (state === "loading") element("loading-kernels", HTMLParagraphElement).textContent = text;
  }

  #showPrompt({ read, total }: Extract<LoadProgress, { phase: "prompt" }>): void {
    if (this.state() === "answering" && read < total)
      this.#stats.textContent = `Reading the prompt: ${read} of ${total} tokens`;
  }

  #tell(label: string, details: string): void {
    element("loading-label", HTMLParagraphElement).textContent = label;
    element("loading-bytes", HTMLParagraphElement).textContent = details;
  }
}
