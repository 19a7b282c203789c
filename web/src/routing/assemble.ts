/** Assembles a whole answer from its chunks. */

import { addCall } from "../protocol/calls.js";
import { CloudError } from "../protocol/errors.js";
import type { HybridAnswer } from "./answer.js";
import type { Choice, Chunk, Completion } from "./openai.js";

export async function assemble(answer: HybridAnswer): Promise<Completion> {
  const message: Choice["message"] = { role: "assistant", content: "" };
  const choice: Choice = { index: 0, message, finish_reason: "stop", logprobs: null };
  let last: Chunk | null = null;
  for await (const chunk of answer.chunks()) {
    last = chunk;
    for (const { delta, finish_reason, logprobs } of chunk.choices) {
      message.content += delta.content ?? "";
      if (delta.reasoning_content)
        message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
      for (const call of delta.tool_calls ?? []) {
        message.tool_calls ??= [];
        addCall(message.tool_calls, call);
      }
      if (finish_reason) choice.finish_reason = finish_reason;
      if (logprobs?.content)
        choice.logprobs = { content: [...(choice.logprobs?.content ?? []), ...logprobs.content] };
    }
  }
  if (last === null) throw new CloudError("The answer was empty.", "shape");
  const { id, created, model } = last;
  return {
    id,
    object: "chat.completion",
    created,
    model,
    choices: [choice],
    usage: answer.usage,
    x_nearfar: answer.info,
  };
}
