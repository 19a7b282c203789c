/** Timeouts that distinguish a slow peer from a page that was suspended. */

import { abortReason } from "../protocol/errors.js";

/** Milliseconds of delay from which a timer counts as suspended with its page, and not as busy. */
const SUSPENDED_MS = 1000;
/** Milliseconds that a peer suspended with the page gets to show that it lives. */
const GRACE_MS = 2000;

/**
 * Resolves with the promise's value, or after `seconds` rejects with the error of `late`. Where the page
 * itself was suspended meanwhile (frozen tab, sleeping machine), the peer perhaps was too, so it gets a short
 * grace. Rejects with the reason of `signal` when that aborts.
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

/** Resolves after `seconds`; rejects with the reason of `signal` as soon as that aborts. */
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

/** A controller that aborts with `parent`, or alone. */
export function childController(parent: AbortSignal): AbortController {
  const child = new AbortController();
  if (parent.aborted) child.abort(parent.reason);
  else
    parent.addEventListener("abort", () => child.abort(parent.reason), { once: true, signal: child.signal });
  return child;
}
