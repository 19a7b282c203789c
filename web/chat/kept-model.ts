/** Shows which models the browser stores, with buttons that delete them. */

import { type CachedModel, cachedModels, deleteModel } from "../src/page/index.js";
import { element, isFocusLost, say } from "./dom.js";
import { formatBytes } from "./format.js";
import { explain, showNotice } from "./notice.js";

export async function openKeptModel(artifact: URL): Promise<void> {
  const isOwn = ({ url }: CachedModel): boolean => url.startsWith(artifact.href);
  const show = async (): Promise<void> => {
    const kept = await cachedModels();
    showRow("kept-model", kept.filter(isOwn), "kept in this browser");
    const others = kept.filter((model) => !isOwn(model));
    const count = others.length === 1 ? "1 other model" : `${others.length} other models`;
    showRow("kept-others", others, `of ${count}`);
  };
  const clear = async (which: (model: CachedModel) => boolean): Promise<void> => {
    try {
      for (const model of (await cachedModels()).filter(which)) await deleteModel(model.url);
      await show();
      say("The download is deleted");
      // The focused button disappeared with the model.
      if (isFocusLost()) element("prompt", HTMLTextAreaElement).focus();
    } catch (error) {
      showNotice(explain(error));
    }
  };
  element("delete-model", HTMLButtonElement).addEventListener("click", () => void clear(isOwn));
  element("delete-others", HTMLButtonElement).addEventListener("click", () => {
    void clear((model) => !isOwn(model));
  });
  await show();
}

/** Shows stored models in one row. Files that models share count for each of them. */
function showRow(id: string, kept: readonly CachedModel[], what: string): void {
  const bytes = kept.reduce((sum, model) => sum + model.bytes, 0);
  element(id, HTMLElement).hidden = bytes === 0;
  element(`${id}-size`, HTMLElement).textContent = `${formatBytes(bytes)} ${what}`;
}
