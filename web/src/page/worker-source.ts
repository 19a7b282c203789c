/**
 * The worker in one piece, put in by scripts/bundle.mjs, for development servers that leave worker.js behind
 * (Vite 6 and 7). The package's `nearfar/worker-source` is this file under the condition "development" alone: it is
 * larger than all the rest.
 */

declare const WORKER_SOURCE: string;

export const workerSource: string | null = WORKER_SOURCE;
