import type { DEVICE_CLASSES } from "../format/constants.js";

/** The backends that run an artifact in a browser. */
export const BACKENDS = ["webgpu", "wasm"] as const;
export type BackendName = (typeof BACKENDS)[number];

/** The kind of GPU for which a program's kernels were made. */
export type DeviceClass = (typeof DEVICE_CLASSES)[number];
