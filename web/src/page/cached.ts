import { modelUrl } from "../artifact/places.js";
import { later } from "../protocol/errors.js";
import type { CachedModel } from "../storage/file-cache.js";

/** The models that the browser stores. Loaded dynamically: a page that only answers does not need it. */

export type { CachedModel };

/** Lists the models in this origin's storage, the last used first. */
export async function cachedModels(): Promise<CachedModel[]> {
  return (await fileCache("cachedModels")).cachedModels();
}

/**
 * Deletes the stored files of the artifact at `url`, or of those in the folder at `url`, except files that
 * other artifacts share. A loaded model keeps running. Returns whether there was one.
 */
export async function deleteModel(url: string | URL): Promise<boolean> {
  const base = modelUrl(url);
  return (await fileCache("deleteModel")).deleteModel(base);
}

function fileCache(what: string): Promise<typeof import("../storage/file-cache.js")> {
  return later(() => import("../storage/file-cache.js"), `The code of ${what}`);
}
