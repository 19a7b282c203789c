/** The models to choose from, and the chosen one: models.json beside the page. */

import { type ListedModel, readModels } from "../src/models/list.js";
import { UnreachableError } from "../src/protocol/errors.js";
import { MissingError } from "../src/storage/http.js";

export interface Offer {
  readonly models: readonly ListedModel[];
  /** The address of the artifact to load. */
  readonly artifact: URL;
}

export const MODELS = "models.json";
/** Folder of the single artifact of a page without a list. */
const ALONE = "artifact/";
const STORAGE = "nearfar.model";

/** Reads the list. The chosen model is the last choice, if it is still there, else the first. */
export async function readOffer(): Promise<Offer> {
  const models = await listed();
  const last = chosen();
  const { url } = models.find(({ url }) => url.href === last) ?? models[0] ?? {};
  return { models, artifact: url ?? new URL(ALONE, location.href) };
}

/**
 * Loads another model by a reload of the page: that surely frees the last one's memory and ends a load in
 * progress. The chat stays.
 */
export function choose({ url }: ListedModel): void {
  try {
    localStorage.setItem(STORAGE, url.href);
  } catch {
    // Storage is full or forbidden, so the next load cannot know which model was chosen.
    throw new Error(
      "This browser does not let the page store which model was chosen. Allow the page to store data.",
    );
  }
  location.reload();
}

function chosen(): string | null {
  try {
    return localStorage.getItem(STORAGE);
  } catch {
    return null;
  }
}

async function listed(): Promise<readonly ListedModel[]> {
  try {
    return await readModels(new URL(MODELS, location.href));
  } catch (error) {
    // A server with one model needs no list; without a network there may be none.
    if (error instanceof MissingError || error instanceof UnreachableError) return [];
    throw error;
  }
}
