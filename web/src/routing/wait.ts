/** Waiting with an end: timeouts that tell a slow peer from a page that was suspended. */

import { abortReason } from "../protocol/errors.js";

/** A timer that comes this much later than it should was suspended with its page, not busy. Milliseconds. */
const SUSPENDED_MS = 1000;
/** What a peer that was suspended with the page gets to show that it lives. */
const GRACE_MS = 2000;

/**
 * The promise's value, or after `seconds` a rejection with what `late` makes. Where the page itself was
 * suspended meanwhile (frozen tab, sleeping machine), the peer was perhaps too, so it gets a short grace.
 * With the reason of `signal` when that says so.
 */
export function within<T>(
  promise: Promise<T>,
  seconds: number,
  late: (suspended: boolean) => Error,
  signal?: AbortSignal,
): Promise<T> {
  return new Promise((resolve, reject) => {
    const onAbort = (): void => reject(abortReason(signal));
    if (signal?.aborted) onAbort();
    else signal?.addEventListener("abort", onAbort, { once: true });
    const due = Date.now() + seconds * 1000;
    let timer = setTimeout(() => {
      if (Date.now() - due < SUSPENDED_MS) reject(late(false));
      else timer = setTimeout(() => reject(late(true)), GRACE_MS);
    }, seconds * 1000);
    promise.then(resolve, reject).finally(() => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", onAbort);
    });
  });
}

/** Resolves after `seconds`; rejects with its reason as soon as `signal` says so. */
export function pause(seconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const onAbort = (): void => {
      clearTimeout(timer);
      reject(abortReason(signal));
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    }, seconds * 1000);
    if (signal.aborted) onAbort();
    else signal.addEventListener("abort", onAbort, { once: true });
  });
}

/** Ends with `parent`, and by itself. */
export function childController(parent: AbortSignal): AbortController {
  const child = new AbortController();
  if (parent.aborted) child.abort(parent.reason);
  else
    parent.addEventListener("abort", () => child.abort(parent.reason), { once: true, signal: child.signal });
  return child;
}
