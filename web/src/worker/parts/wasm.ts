import "./core.js";

export { loadWasm } from "../wasm/load.js";
