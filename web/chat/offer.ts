/** Which models there are to choose from, and the one that was chosen: models.json beside the page. */

import { type ListedModel, readModels } from "../src/models/list.js";
import { UnreachableError } from "../src/protocol/errors.js";
import { MissingError } from "../src/storage/http.js";

export interface Offer {
  readonly models: readonly ListedModel[];
  /** What to load. */
  readonly artifact: URL;
}

export const MODELS = "models.json";
/** Where the one artifact is that a page without a list has. */
const ALONE = "artifact/";
const STORAGE = "nearfar.model";

/** The model that was chosen last, if there still is one, else the first. */
export async function readOffer(): Promise<Offer> {
  const models = await listed();
  const last = chosen();
  const { url } = models.find(({ url }) => url.href === last) ?? models[0] ?? {};
  return { models, artifact: url ?? new URL(ALONE, location.href) };
}

/**
 * Loads another model. With the page: so the last one's memory is free for sure, and a load that goes on
 * ends. The chat stays.
 */
export function choose({ url }: ListedModel): void {
  try {
    localStorage.setItem(STORAGE, url.href);
  } catch {
    // Storage that is full or forbidden: nothing tells the next load which model was meant.
    throw new Error("This browser forbids the page to keep which model was chosen. Allow it to keep data.");
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
    // A server that offers one model needs no list; without a network there may be none.
    if (error instanceof MissingError || error instanceof UnreachableError) return [];
    throw error;
  }
}
