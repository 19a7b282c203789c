/**
 * The worker in one piece, put in by scripts/bundle.mjs; loaded only where worker.js cannot be had as a file.
 */

declare const WORKER_SOURCE: string;

export const workerSource: string = WORKER_SOURCE;
