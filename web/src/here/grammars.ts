/**
 * What follows grammars, in one piece: for service workers, which cannot load it later. It is given to
 * `createEngine` or `shareEngine` of `nearfar/here`, as their option `grammars`.
 */

export { follow as grammars } from "../grammar/follow.js";
