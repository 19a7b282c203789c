import "./core.js";

export { createTextCodec } from "../text/index.js";
