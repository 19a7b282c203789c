/**
 * The chunk for answers with reasoning or calls. It is loaded with a model whose answers have marks, or by the first
 * request with tools.
 */

export { answerGrammar } from "./asking.js";
export { readAnswerFormat } from "./format.js";
export { PieceReader } from "./pieces.js";
export { prompting } from "./prompting.js";
export { AnswerReader } from "./reader.js";
