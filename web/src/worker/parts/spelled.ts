import "./core.js";

export { spelledArguments } from "../answers/spelled.js";
