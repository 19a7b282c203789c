/**
 * The code that follows grammars, in one piece: for service workers, which cannot load it later. Pass it to
 * `createEngine` or `shareEngine` of `nearfar/here` as their option `grammars`.
 */

import { type Follow, followWith } from "../grammar/follow.js";
import { Follower } from "../grammar/index.js";

/** The code that follows grammars, for `createEngine` and `shareEngine` of `nearfar/here`. */
export const grammars: Follow = followWith(async () => ({ Follower }));
