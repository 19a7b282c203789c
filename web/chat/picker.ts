/** The list of models: size of each, whether it would run here and why not, and the choice of one. */

import type { ListedModel } from "../src/models/list.js";
import { cachedModels } from "../src/page/index.js";
import { element } from "./dom.js";
import { formatBytes, formatCount } from "./format.js";
import { explain, showNotice } from "./notice.js";
import { choose } from "./offer.js";

/** Shows the list where there is a choice. `artifact`: the one that is loaded. */
export function openPicker(models: readonly ListedModel[], artifact: URL): void {
  if (models.length < 2) return;
  const rows = models.map((model) => new Row(model, model.url.href === artifact.href));
  element("model-list", HTMLUListElement).replaceChildren(...rows.map(({ node }) => node));
  const box = element("models", HTMLDetailsElement);
  box.hidden = false;
  // The manifests that say whether a model runs are read only when somebody opens the list.
  box.addEventListener("toggle", () => void lookAll(rows), { once: true });
}

class Row {
  readonly node = document.createElement("li");
  readonly #button = document.createElement("button");
  readonly #fit = line("Checking whether it runs here");
  readonly #facts: HTMLElement;

  constructor(
    readonly model: ListedModel,
    isLoaded: boolean,
  ) {
    const { name, bytes, contextLength, license, description } = model;
    const context = contextLength === null ? null : `${formatCount(contextLength)} tokens of context`;
    this.#facts = line([formatBytes(bytes), context, license].filter((fact) => fact !== null).join(" · "));
    const title = document.createElement("strong");
    title.textContent = name;
    this.#button.type = "button";
    this.#button.className = "choice";
    this.#button.append(title, this.#facts, ...(description === null ? [] : [line(description)]), this.#fit);
    if (isLoaded) this.#button.setAttribute("aria-current", "true");
    this.#button.addEventListener("click", () => {
      if (!isLoaded && this.#button.ariaDisabled !== "true") attempt(() => choose(model));
    });
    this.node.append(this.#button);
  }

  /** Marks the model as stored in this browser. */
  markKept(): void {
    this.#facts.textContent += " · kept in this browser";
  }

  /** Shows whether the model would run here, and with how much context. */
  async look(): Promise<void> {
    // Loaded only for whoever opens the list.
    const { isSupported } = await import("../src/models/index.js");
    try {
      const { supported, reason, contextLength } = await isSupported(this.model.url);
      const shorter = supported && contextLength < (this.model.contextLength ?? 0);
      const length = shorter ? `, with ${formatCount(contextLength)} tokens of context` : "";
      this.#tell(supported, supported ? `Runs here${length}` : `Does not run here: ${reason}`);
    } catch (error) {
      this.#tell(false, explain(error).text);
    }
  }

  #tell(able: boolean, text: string): void {
    this.#fit.textContent = text;
    this.#fit.classList.toggle("unfit", !able);
    // A model that does not run stays reachable by keyboard, so that its reason is read out.
    this.#button.ariaDisabled = able ? null : "true";
  }
}

async function lookAll(rows: readonly Row[]): Promise<void> {
  const kept = await cachedModels().catch(() => []);
  for (const row of rows)
    if (kept.some(({ url, complete }) => complete && url.startsWith(row.model.url.href))) row.markKept();
  // One after the other: each queries the GPU.
  for (const row of rows) await row.look();
}

function attempt(run: () => void): void {
  try {
    run();
  } catch (error) {
    showNotice(explain(error));
  }
}

function line(text: string): HTMLElement {
  const node = document.createElement("span");
  node.className = "muted";
  node.textContent = text;
  return node;
}
