/**
 * What follows grammars, in one piece: for service workers, which cannot load it later. It is given to
 * `createEngine` or `shareEngine` of `nearfar/here`, as their option `grammars`.
 */

import { followWith } from "../grammar/follow.js";
import { Follower } from "../grammar/index.js";

export const grammars = followWith(async () => ({ Follower }));
