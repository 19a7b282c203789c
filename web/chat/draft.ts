/** The message that is being written: it outlives a load of the page in its tab, such as for another model. */

const STORAGE = "nearfar.draft";

export interface Draft {
  /** Puts back what was written at this address; whether there was something. */
  restore(): boolean;
  forget(): void;
}

/** Keeps what a person writes into the field, for this tab and this address alone. */
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

/** Storage that is full or forbidden: the draft lasts as long as the page. */
function quietly<T>(run: () => T): T | null {
  try {
    return run();
  } catch {
    return null;
  }
}
