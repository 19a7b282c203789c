import { later } from "../both/errors.js";
import { followWith } from "../grammar/follow.js";
// Not in the worker's entry, whose declarations would name all of it.
import "./parts/core.js";

/** Follows grammars; its code is loaded by the first word. */
export const follow = followWith(() => later(() => import("./parts/grammar.js"), "its code"));
