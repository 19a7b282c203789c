/** Splits a text at the added tokens of a tokenizer, before all other steps, as the Rust library does. */

import type { AddedToken, Tokenizer } from "@huggingface/tokenizers";

/**
 * The library's own splitter, a trie that takes the leftmost, longest token. The library does not export the class,
 * so it is taken from an instance.
 */
interface Splitter {
  split(text: string): string[];
}

/** Members of the library's tokenizer that its types declare private. */
interface Inside {
  readonly added_tokens: readonly AddedToken[];
  readonly splitter_normalized: Splitter & { readonly constructor: new (contents: string[]) => Splitter };
  encode_text(text: string | null): string[] | null;
}

type Section = string | { readonly token: AddedToken };

const WORD = /[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]/u;
const BLANK = /\p{White_Space}/u;

/**
 * Replaces the library's splitting, which finds single-word tokens inside words, takes JavaScript's white space
 * around tokens, treats the second piece of a text as the text's beginning, and joins unknown characters across
 * words.
 */
export function withOwnSections(tokenizer: Tokenizer): void {
  const inside = tokenizer as unknown as Inside;
  const { normalizer, pre_tokenizer, model } = tokenizer;
  const contents = (normalized: boolean): Map<string, AddedToken> =>
    new Map(
      inside.added_tokens
        .filter((token) => token.normalized === normalized && token.content !== "")
        .map((token) => [normalized && normalizer ? normalizer(token.content) : token.content, token]),
    );
  const cutter = (tokens: Map<string, AddedToken>) => {
    const splitter = new inside.splitter_normalized.constructor([...tokens.keys()]);
    return (text: string): Section[] => sections(text, splitter, tokens);
  };
  const first = cutter(contents(false));
  const second = cutter(contents(true));
  const encodePiece = (text: string, begins: boolean): string[] => {
    const words = pre_tokenizer ? pre_tokenizer(text, { section_index: begins ? 0 : 1 }) : [text];
    return words.flatMap((word) => model?.([word]) ?? []);
  };
  inside.encode_text = (text) => {
    if (text === null) return null;
    const made: string[] = [];
    let begins = true;
    const put = (piece: Section): void => {
      if (typeof piece !== "string") made.push(piece.token.content);
      else if (piece !== "") made.push(...encodePiece(piece, begins));
      begins = false;
    };
    for (const piece of first(text)) {
      if (typeof piece !== "string") put(piece);
      else for (const inner of second(normalizer ? normalizer(piece) : piece)) put(inner);
    }
    return made;
  };
}

function sections(text: string, splitter: Splitter, tokens: ReadonlyMap<string, AddedToken>): Section[] {
  const made: Section[] = [];
  let at = 0;
  let from = 0;
  for (const part of splitter.split(text)) {
    let start = at;
    at += part.length;
    let stop = at;
    const token = tokens.get(part);
    if (!token || (token.single_word && touchesWord(text, start, stop))) continue;
    if (token.lstrip) while (start > from && BLANK.test(text.charAt(start - 1))) start--;
    if (token.rstrip) while (stop < text.length && BLANK.test(text.charAt(stop))) stop++;
    // The token before may have taken the white space before this token, which then begins where the other ends.
    if (start < from) start = from;
    if (start > from) made.push(text.slice(from, start));
    made.push({ token });
    from = stop;
  }
  if (from < text.length) made.push(text.slice(from));
  return made;
}

function touchesWord(text: string, start: number, stop: number): boolean {
  const before = [...text.slice(Math.max(start - 2, 0), start)].at(-1) ?? "";
  const [after = ""] = text.slice(stop, stop + 2);
  return WORD.test(before) || WORD.test(after);
}
