/**
 * Follows grammars, in a separate worker where possible: a compilation can be ended only with its worker, and
 * masks are computed while the device runs.
 */

import type {
  CompiledGrammar,
  GrammarCompiler,
  GrammarMatcher,
  StructuralTagFormat,
} from "@mlc-ai/web-xgrammar";
import { RequestError } from "../protocol/errors.js";
import type { Grammar } from "../protocol/grammar.js";
import { ebnfOf, JSON_OBJECT } from "./ebnf.js";
import { listening, loadLibrary, reasonOf } from "./library.js";
import { regexGrammar } from "./patterns.js";
import { type Narrowing, narrowed } from "./schema.js";
import type { FromGrammars, ToGrammars } from "./words.js";

/** Number of compiled grammars that are kept. */
const KEPT = 16;

type Library = Awaited<ReturnType<typeof loadLibrary>>;

/** Answers a worker's messages, in order. */
export class Follower {
  #library: Library | null = null;
  #compiler: GrammarCompiler | null = null;
  #ends: readonly number[] = [];
  readonly #kept = new Map<string, CompiledGrammar>();
  readonly #answers = new Map<number, { readonly matcher: GrammarMatcher; readonly ignoreEos: boolean }>();

  /** Returns the answer to a message; null where there is none. */
  async answer(word: ToGrammars): Promise<FromGrammars | null> {
    switch (word.type) {
      case "vocabulary":
        return this.#begin(word.pieces, word.ends);
      case "close":
        this.#answers.get(word.id)?.matcher.dispose();
        this.#answers.delete(word.id);
        return null;
      case "start":
      case "accept":
        try {
          return await this.#follow(word);
        } catch (error) {
          const broken = !(error instanceof RequestError);
          return { type: "refused", message: broken ? reasonOf(error) : error.message, broken };
        }
    }
  }

  async #begin(pieces: readonly string[], ends: readonly number[]): Promise<FromGrammars> {
    if (!mayCompile())
      return {
        type: "failed",
        code: "unsupported",
        message: "the Content-Security-Policy forbids WebAssembly: allow 'wasm-unsafe-eval' in script-src",
      };
    this.#library = await loadLibrary();
    const { TokenizerInfo, GrammarCompiler } = this.#library;
    this.#ends = ends;
    const size = pieces.length;
    const info = await listening(() =>
      TokenizerInfo.createTokenizerInfo([...pieces], "byte_level", false, size, [...ends]),
    );
    this.#compiler = await GrammarCompiler.createGrammarCompiler(info, false);
    return { type: "ready" };
  }

  async #follow(word: Extract<ToGrammars, { type: "start" | "accept" }>): Promise<FromGrammars> {
    if (word.type === "start") await this.#start(word);
    const answer = this.#answers.get(word.id);
    if (!answer) throw new Error(`no answer ${word.id} has been started`);
    const { matcher, ignoreEos } = answer;
    const tokens = word.type === "start" ? word.tokens : [word.token];
    for (const token of tokens)
      if (!matcher.acceptToken(token)) throw new Error(`token ${token} came, which was not allowed`);
    if (matcher.isTerminated()) return { type: "complete" };
    const mask = await matcher.getNextTokenBitmask();
    const words = Uint32Array.from(mask, (bits) => bits >>> 0);
    const rest = Uint32Array.from(words);
    for (const end of this.#ends) rest[end >> 5] = (rest[end >> 5] ?? 0) & ~(1 << (end & 31));
    if (rest.some((bits) => bits !== 0)) return { type: "allowed", words: ignoreEos ? rest : words };
    if (words.some((bits) => bits !== 0)) return { type: "complete" };
    throw new RequestError("no token of this model can continue the answer as response_format asks for it");
  }

  async #start({ id, grammar, ignoreEos }: Extract<ToGrammars, { type: "start" }>): Promise<void> {
    const { GrammarMatcher } = this.#parts();
    const compiled = await this.#compiled(grammar);
    this.#answers.set(id, { matcher: await GrammarMatcher.createGrammarMatcher(compiled), ignoreEos });
  }

  async #compiled(grammar: Grammar): Promise<CompiledGrammar> {
    const key = `${grammar.kind}\n${grammar.text}`;
    const compiled = this.#kept.get(key) ?? (await this.#compile(grammar));
    this.#kept.delete(key);
    this.#kept.set(key, compiled);
    const [oldest] = this.#kept;
    if (oldest && this.#kept.size > KEPT) {
      this.#kept.delete(oldest[0]);
      oldest[1].dispose();
    }
    return compiled;
  }

  async #compile({ kind, text }: Grammar): Promise<CompiledGrammar> {
    const { compiler } = this.#parts();
    switch (kind) {
      case "json_object":
        return compiler.compileGrammar(JSON_OBJECT, "root");
      case "json_schema":
        return compiler.compileGrammar(schemaGrammar(JSON.parse(text)), "root");
      case "regex":
        return compiler.compileGrammar(
          readable("regex", () => regexGrammar(text)),
          "root",
        );
      case "ebnf":
        return compiler.compileGrammar(text, "root");
      case "structural_tag":
        return compiler.compileStructuralTag({ format: withGrammars(JSON.parse(text).format) });
    }
  }

  #parts(): Library & { readonly compiler: GrammarCompiler } {
    if (!this.#library || !this.#compiler) throw new Error("the first word must be the vocabulary");
    return { ...this.#library, compiler: this.#compiler };
  }
}

function schemaGrammar(schema: unknown, narrowing?: Narrowing): string {
  const made = narrowed(schema, narrowing);
  return readable("json schema", () => ebnfOf(made));
}

/** Runs `read`; its error becomes a RequestError. */
function readable(what: string, read: () => string): string {
  try {
    return read();
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    throw new RequestError(`the ${what} cannot be enforced: ${why}`, "response_format");
  }
}

/** A schema within a structural tag: `strict` and `param` are for our own narrowing. */
type SchemaFormat = Extract<StructuralTagFormat, { type: "json_schema" }> & Narrowing;

/** Replaces the schemas in a part of a structural tag by grammars: the library would not narrow them. */
function withGrammars(format: StructuralTagFormat): StructuralTagFormat {
  switch (format.type) {
    case "json_schema": {
      const { json_schema, ...narrowing } = format as SchemaFormat;
      return { type: "grammar", grammar: schemaGrammar(json_schema, narrowing) };
    }
    case "sequence":
    case "or":
      return { ...format, elements: format.elements.map(withGrammars) };
    case "tag":
      return { ...format, content: withGrammars(format.content) };
    case "triggered_tags":
    case "tags_with_separator":
      return { ...format, tags: format.tags.map((tag) => ({ ...tag, content: withGrammars(tag.content) })) };
    default:
      return format;
  }
}

/** Whether WebAssembly may be compiled here, tried with an empty module. */
function mayCompile(): boolean {
  try {
    return new WebAssembly.Module(Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0)) instanceof WebAssembly.Module;
  } catch {
    return false;
  }
}
