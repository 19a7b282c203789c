import { followWith } from "../../grammar/follow.js";
import { later } from "../../protocol/errors.js";
// This import is not in the worker's entry, whose declarations would then name all of it.
import "./core.js";

/** Follows grammars; the code for that is loaded by the first message. */
export const follow = followWith(() => later(() => import("./grammar.js"), "its code"));
