/** Options of a client: both sides, the policy, and the stored state. */

import type { ThresholdRecord } from "./calibration.js";
import type { CloudOptions } from "./cloud.js";
import type { DeviceEngine } from "./device.js";
import type { Hints } from "./hints.js";
import type { LedgerRecord } from "./ledger.js";
import type { PolicyOptions } from "./policy.js";
import type { PrivateRecord } from "./privacy.js";
import type { DecisionRecord } from "./records.js";
import type { Scorer } from "./scorer.js";
import type { SpeedRecord } from "./speed.js";
import type { Feature } from "./types.js";

/** The state that is stored between visits. */
export interface KeptState {
  readonly ledger?: LedgerRecord;
  readonly threshold?: ThresholdRecord;
  /** Ids of private conversations, and marks of private texts; the old form had the ids alone. */
  readonly private?: PrivateRecord | readonly string[];
  readonly speeds?: { readonly device: SpeedRecord; readonly cloud: SpeedRecord };
}

/** Stores the state between visits. */
export interface Store {
  read(): KeptState | null;
  write(state: KeptState): void;
}

/** The two sides, the policy, and what is kept. */
export interface HybridOptions {
  /** The engine of the device; null until it is loaded, and it may be set later. */
  readonly device?: DeviceEngine | null;
  readonly cloud?: CloudOptions | null;
  readonly policy?: PolicyOptions;
  /**
   * Scores the difficulty of requests; without it none has a difficulty. May be set later, when it is loaded.
   */
  readonly difficulty?: Scorer | null;
  /** Features of the engine; by default those that it reports. */
  readonly device_features?: readonly Feature[];
  /** Replaces the browser's own hints. */
  readonly hints?: { read(): Hints };
  /** Stores budgets, threshold and speeds; nothing is stored by default. */
  readonly store?: Store | null;
  readonly onRecord?: (record: DecisionRecord) => void;
  /** Called when the device failed; the application may load it again and set `device`. */
  readonly onDeviceLost?: (error: Error) => void;
  /** Uniform in [0, 1), for the jitter of retries. */
  readonly random?: () => number;
}
