import { type RefObject, useInsertionEffect, useRef } from "react";

/**
 * What the last render that is on the page gave. It is there before any effect of the app's and before the page
 * can be touched, so that who acts on what they see (a status that says "ready") finds what they saw; a
 * `useEffect` would run a while later, and `useLayoutEffect` warns on servers before React 19.
 */
export function useLatest<T>(value: T): Readonly<RefObject<T>> {
  const latest = useRef(value);
  useInsertionEffect(() => {
    latest.current = value;
  });
  return latest;
}
