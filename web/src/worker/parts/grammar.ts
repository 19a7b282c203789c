import "./core.js";

export { Follower } from "../../grammar/index.js";
