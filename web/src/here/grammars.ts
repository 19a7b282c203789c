/**
 * What follows grammars, in one piece: for service workers, which cannot load it later. It is given to
 * `createEngine` or `shareEngine` of `nearfar/here`, as their option `grammars`.
 */

import { type Follow, followWith } from "../grammar/follow.js";
import { Follower } from "../grammar/index.js";

/** What follows grammars, for `createEngine` and `shareEngine` of `nearfar/here`. */
export const grammars: Follow = followWith(async () => ({ Follower }));
