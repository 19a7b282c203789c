import { modelUrl } from "../artifact/places.js";
import { later } from "../protocol/errors.js";
import type { CachedModel } from "../storage/file-cache.js";

/** What the browser keeps of models. By dynamic import: a page that is to answer does not ask. */

export type { CachedModel };

/** The models in this origin's storage, the last used first. */
export async function cachedModels(): Promise<CachedModel[]> {
  return (await fileCache("cachedModels")).cachedModels();
}

/**
 * Deletes what is kept of the artifact at `url`, or of those in the folder at `url`, but for files that other
 * artifacts share. A model that is loaded runs on. Whether there was one.
 */
export async function deleteModel(url: string | URL): Promise<boolean> {
  const base = modelUrl(url);
  return (await fileCache("deleteModel")).deleteModel(base);
}

function fileCache(what: string): Promise<typeof import("../storage/file-cache.js")> {
  return later(() => import("../storage/file-cache.js"), `The code of ${what}`);
}
