/** One model's chats: converts them to prompts, and reads their answers. */

import type { AnswerFormatRecord } from "../../format/constants.js";
import { RequestError } from "../../protocol/errors.js";
import type { Grammar } from "../../protocol/grammar.js";
import type { Prompt } from "../../protocol/messages.js";
import type { AnswerFormat } from "../answers/format.js";
import type { PieceReader } from "../answers/pieces.js";
import type { Parts } from "../loading/parts.js";
import type { TextCodec, Told } from "../text/types.js";
import { checkRoles } from "./roles.js";

export type Chat = Extract<Prompt, { kind: "chat" }>;

/** A chat as the model's prompt. */
export interface ChatPrompt {
  readonly tokens: number[];
  /** Whether the prompt has begun a section of reasoning. */
  readonly reasoningOpen: boolean;
  /** The end of its text. */
  readonly end: string;
}

/** Characters of the end of a prompt that are kept, to see which tokens continue it. */
export const END = 64;

type Answers = typeof import("../answers/index.js");

export class Chats {
  #answers: Answers | null = null;
  #form: AnswerFormat | null = null;

  constructor(
    private readonly codec: TextCodec,
    private readonly record: AnswerFormatRecord | null,
    private readonly parts: Pick<Parts, "answers" | "spelled">,
  ) {}

  /** Whether a chat has to wait for `load`. */
  lacks(prompt: Prompt): boolean {
    if (this.#answers || prompt.kind !== "chat") return false;
    return this.marksText || prompt.calling !== undefined || prompt.messages.some(isOfTools);
  }

  /** Whether answers have marks even without tools. */
  get marksText(): boolean {
    const { reasoning, text, dropped = [] } = this.record ?? {};
    return !!reasoning || !!text || dropped.length > 0;
  }

  async load(): Promise<void> {
    this.#answers ??= await this.parts.answers();
    this.#form ??= this.record && this.#answers.readAnswerFormat(this.record, "manifest.json.answers");
  }

  /** Whether the model can call tools. */
  get canCall(): boolean {
    return !!this.record?.calls && this.codec.templateFor(true) !== null;
  }

  encode({ messages, continueLast, calling, variables }: Chat): ChatPrompt {
    const calls = this.#form?.calls ?? null;
    if (calling && !calls)
      throw new RequestError(
        "tools: this artifact does not say how its model calls them. Build it again with this version of nearfar.",
        "tools",
        { code: "unsupported" },
      );
    const tools = calling?.tools ?? [];
    const template = this.codec.templateFor(tools.length > 0);
    checkRoles(messages, template ?? "");
    const told =
      this.#answers && template !== null && (calling || messages.some(isOfTools))
        ? this.#answers.prompting(messages, tools, calls, template)
        : { messages: messages as readonly object[] as readonly Told[], tools };
    const text = this.codec.render(told.messages, { continueLast, tools: told.tools, variables });
    const begin = this.#form?.reasoning?.begin.trimEnd();
    return {
      // The template writes BOS and all other special tokens itself.
      tokens: this.codec.encode(text, { addSpecialTokens: false }),
      reasoningOpen: !!begin && text.trimEnd().endsWith(begin),
      end: text.slice(-END),
    };
  }

  /**
   * The grammar of an answer, with its reasoning and calls; `wanted` is the grammar of the text for the user.
   */
  async grammar(
    { calling }: Chat,
    wanted: Grammar | null,
    { reasoningOpen }: ChatPrompt,
  ): Promise<Grammar | null> {
    if (!this.#form || !this.#answers || !(calling || wanted)) return wanted;
    const { spelled } = this.parts;
    const grammar = await this.#answers.answerGrammar(
      this.#form,
      calling ?? null,
      wanted,
      reasoningOpen,
      async () => (await spelled()).spelledArguments,
    );
    return grammar && calling ? { ...grammar, param: "tools" } : grammar;
  }

  /**
   * A reader that takes one answer apart; null if the answer is all text. `wanted` is the grammar of the text
   * for the user.
   */
  reader({ calling }: Chat, wanted: Grammar | null, { reasoningOpen }: ChatPrompt): PieceReader | null {
    if (!this.#form || !this.#answers || !(calling || this.marksText)) return null;
    const { AnswerReader, PieceReader } = this.#answers;
    const callsOnly = calling?.required ?? false;
    // Text in a wanted format may look like a call.
    const loose = !wanted && !callsOnly;
    const options = { tools: calling?.tools ?? [], reasoningOpen, callsOnly, loose };
    return new PieceReader(new AnswerReader(this.#form, options));
  }
}

function isOfTools({
  role,
  tool_calls,
}: {
  readonly role: string;
  readonly tool_calls?: readonly unknown[];
}): boolean {
  return role === "tool" || !!tool_calls?.length;
}
