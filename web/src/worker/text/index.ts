export { createTextCodec } from "./codec.js";
