import { type RefObject, useInsertionEffect, useRef } from "react";

/**
 * The value of the last committed render. It is set before any effect of the app and before the user can act
 * on the page, so that an action on a visible state (a status "ready") uses the visible value. A `useEffect`
 * would run later, and `useLayoutEffect` warns on servers before React 19.
 */
export function useLatest<T>(value: T): Readonly<RefObject<T>> {
  const latest = useRef(value);
  useInsertionEffect(() => {
    latest.current = value;
  });
  return latest;
}
