/** The platform's hints on power and network. Browsers differ in what they report; null means unknown. */

export interface Hints {
  readonly online: boolean;
  /** 0 to 1. */
  readonly battery: number | null;
  readonly charging: boolean | null;
  /** Whether the connection is paid by volume, or the person asked to save data. */
  readonly metered: boolean | null;
}

interface Battery {
  readonly level: number;
  readonly charging: boolean;
}

/** The parts of Navigator that TypeScript's library lacks, because not every browser has them. */
interface Platform {
  readonly onLine?: boolean;
  readonly connection?: { readonly saveData?: boolean; readonly type?: string };
  getBattery?(): Promise<Battery>;
}

/** Reads the hints from the browser; the battery is requested once and then updates itself. */
export class PlatformHints {
  #battery: Battery | null = null;

  constructor(
    private readonly platform: Platform | undefined = globalThis.navigator as Platform | undefined,
  ) {
    this.platform
      ?.getBattery?.()
      .then((battery) => {
        this.#battery = battery;
      })
      // A permissions policy refused it: then it stays unknown.
      .catch(() => undefined);
  }

  read(): Hints {
    const { onLine, connection } = this.platform ?? {};
    const metered = connection ? connection.saveData === true || connection.type === "cellular" : null;
    return {
      online: onLine !== false,
      battery: this.#battery?.level ?? null,
      charging: this.#battery?.charging ?? null,
      metered,
    };
  }
}
