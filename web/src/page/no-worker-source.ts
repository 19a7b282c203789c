/** Replaces the worker's copy (worker-source.ts) outside of development servers. */

export const workerSource: string | null = null;
