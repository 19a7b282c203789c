import "./core.js";

export * from "../answers/index.js";
