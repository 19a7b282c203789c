// @ts-check
/** Copies the difficulty model, whose home is the Python package, to dist/routing/difficulty.json. */
import { cp, mkdir } from "node:fs/promises";

const routing = new URL("../dist/routing/", import.meta.url);
await mkdir(routing, { recursive: true });
await cp(
  new URL("../../routing/difficulty/model.json", import.meta.url),
  new URL("difficulty.json", routing),
);
