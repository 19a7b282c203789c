import "./core.js";

export { loadExecutor } from "../gpu/load.js";
