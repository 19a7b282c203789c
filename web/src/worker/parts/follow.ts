import { followWith } from "../../grammar/follow.js";
import { later } from "../../protocol/errors.js";
// Not in the worker's entry, whose declarations would name all of it.
import "./core.js";

/** Follows grammars; its code is loaded by the first word. */
export const follow = followWith(() => later(() => import("./grammar.js"), "its code"));
