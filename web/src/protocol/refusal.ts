import type { ErrorRecord } from "./errors.js";
import type { FromWorker, Question } from "./messages.js";

/** The answer that ends a question with an error. */
export function refusalOf({ type, id }: Question, error: ErrorRecord): FromWorker {
  switch (type) {
    case "generate":
    case "embed":
      return { type: "answer", id, answer: { event: "error", error } };
    case "count":
      return { type: "counted", id, tokens: error };
    case "profile":
      return { type: "profiled", id, profile: error };
    case "stats":
      return { type: "stats", id, stats: error };
  }
}
