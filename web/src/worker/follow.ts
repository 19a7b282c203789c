import { later } from "../both/errors.js";
import { followWith } from "../grammar/follow.js";

/** Follows grammars; its code is loaded by the first word. */
export const follow = followWith(() => later(() => import("./parts/grammar.js"), "its code"));
