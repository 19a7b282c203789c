"use client";

import { useEffect } from "react";
import { ask, show } from "./asks.js";

export function Asks() {
  // Once, also where React runs effects twice.
  useEffect(() => {
    if (globalThis.isAsking) return;
    globalThis.isAsking = true;
    show(ask("/parrot/"));
  }, []);
  return null;
}
