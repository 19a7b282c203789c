/**
 * Jinja for chat templates. Parses and renders templates as transformers does, including the behaviour of Python's
 * values. JavaScript libraries print other texts for the same template (docs/decisions/0027-a-jinja-for-browsers.md).
 */

export { TemplateError } from "./lexer.js";
export { vocabulary } from "./library.js";
export type { Body } from "./nodes.js";
export { parse } from "./parser.js";
export { render } from "./render.js";
export { fromJs, type Value } from "./values.js";
