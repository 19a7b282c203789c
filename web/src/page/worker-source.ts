/**
 * The worker as one text, inserted by scripts/bundle.mjs, for development servers that do not copy worker.js
 * (Vite 6 and 7). The package's `nearfar/worker-source` is this file only under the condition "development",
 * because it is larger than the rest of the page's code.
 */

declare const WORKER_SOURCE: string;

export const workerSource: string | null = WORKER_SOURCE;
