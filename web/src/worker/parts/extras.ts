import "./core.js";

export * from "../session/extras.js";
