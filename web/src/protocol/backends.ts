import type { DEVICE_CLASSES } from "../format/constants.js";

/** What a browser runs an artifact with. */
export const BACKENDS = ["webgpu", "wasm"] as const;
export type BackendName = (typeof BACKENDS)[number];

/** The kind of GPU that a program's kernels are shaped for. */
export type DeviceClass = (typeof DEVICE_CLASSES)[number];
