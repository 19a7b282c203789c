/**
 * The message that is being written. It survives a reload of the page in its tab, for example for another
 * model.
 */

const STORAGE = "nearfar.draft";

export interface Draft {
  /** Restores the draft of this address. Returns whether there was one. */
  restore(): boolean;
  forget(): void;
}

/** Stores what a person writes into the field, for this tab and this address only. */
export function keepDraft(field: HTMLTextAreaElement): Draft {
  const address = location.pathname + location.search;
  field.addEventListener("input", () => quietly(() => sessionStorage.setItem(STORAGE, written())));
  const written = (): string => JSON.stringify([address, field.value]);
  return {
    restore: () =>
      quietly(() => {
        const [where, text] = JSON.parse(sessionStorage.getItem(STORAGE) ?? "[]") as unknown[];
        if (where !== address || typeof text !== "string" || text === "") return false;
        field.value = text;
        return true;
      }) ?? false,
    forget: () => void quietly(() => sessionStorage.removeItem(STORAGE)),
  };
}

/** Runs `run`; null where the storage is full or forbidden: then the draft lasts as long as the page. */
function quietly<T>(run: () => T): T | null {
  try {
    return run();
  } catch {
    return null;
  }
}
