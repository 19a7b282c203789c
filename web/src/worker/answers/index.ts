/** What answers with marks need: loaded with a model that has them, or by the first request with tools. */

export { answerGrammar } from "./asking.js";
export { readAnswerFormat } from "./format.js";
export { PieceReader } from "./pieces.js";
export { prompting } from "./prompting.js";
export { AnswerReader } from "./reader.js";
