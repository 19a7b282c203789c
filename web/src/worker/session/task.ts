import type { ModelInfo } from "../../artifact/manifest.js";
import { RequestError } from "../../protocol/errors.js";

/** The error for a request whose task the model does not have. */
export function wrongTask({ name, task }: ModelInfo): RequestError {
  return new RequestError(
    task === "embed"
      ? `${name} gives embeddings and no text: ask engine.embeddings, or load a model that writes.`
      : `${name} gives text and no embeddings: load a model that was built with --embeddings.`,
    "model",
  );
}
