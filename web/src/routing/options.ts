/** What a client is given: both sides, the policy, and what is kept. */

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

/** What is kept from visit to visit. */
export interface KeptState {
  readonly ledger?: LedgerRecord;
  readonly threshold?: ThresholdRecord;
  /** Ids of private conversations, and marks of private texts; the old form had the ids alone. */
  readonly private?: PrivateRecord | readonly string[];
  readonly speeds?: { readonly device: SpeedRecord; readonly cloud: SpeedRecord };
}

/** Where the state is kept between visits. */
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
  /** Scores the difficulty of requests; all look alike without it. May be set later, when it is loaded. */
  readonly difficulty?: Scorer | null;
  /** What the engine can do; by default what it says of itself. */
  readonly device_features?: readonly Feature[];
  /** Instead of the browser's own. */
  readonly hints?: { read(): Hints };
  /** Keeps budgets, threshold and speeds; nothing is kept by default. */
  readonly store?: Store | null;
  readonly onRecord?: (record: DecisionRecord) => void;
  /** The device failed; the application may load it again and set `device`. */
  readonly onDeviceLost?: (error: Error) => void;
  /** Uniform in [0, 1), for the jitter of retries. */
  readonly random?: () => number;
}
