/**
 * Shows markdown as elements of the page. HTML is never parsed: HTML that the model writes stays text, so
 * nothing needs to be sanitized. While an answer grows, only the blocks that changed are rebuilt.
 */

import { lexer, type MarkedToken, type Token, type Tokens } from "marked";
import { copyButton } from "./copy.js";

/** The view of an answer that grows: `show` takes all of its text so far. */
export class Markdown {
  #blocks: { readonly raw: string; readonly nodes: readonly Node[] }[] = [];

  constructor(private readonly parent: HTMLElement) {}

  show(text: string): void {
    const tokens = lexer(text).filter(({ type }) => type !== "space");
    let same = 0;
    while (same < tokens.length && tokens[same]?.raw === this.#blocks[same]?.raw) same++;
    for (const { nodes } of this.#blocks.splice(same))
      for (const node of nodes) node.parentNode?.removeChild(node);
    for (const token of tokens.slice(same)) {
      const nodes = [blockOf(token)];
      this.parent.append(...nodes);
      this.#blocks.push({ raw: token.raw, nodes });
    }
  }
}

function blockOf(any: Token): Node {
  const token = any as MarkedToken;
  switch (token.type) {
    // The page's own headings end at h2: an answer's begin below.
    case "heading":
      return make(`h${Math.min(token.depth + 2, 6)}`, inline(token.tokens));
    case "paragraph":
      return make("p", inline(token.tokens));
    case "text":
      return token.tokens ? make("span", inline(token.tokens)) : document.createTextNode(token.text);
    case "code":
      return codeBlock(token.text, token.lang ?? "");
    case "blockquote":
      return make("blockquote", token.tokens.filter(isSeen).map(blockOf));
    case "list":
      return listOf(token);
    case "table":
      return tableOf(token);
    case "hr":
      return make("hr", []);
    // A definition of a link shows nothing.
    case "def":
      return document.createTextNode("");
    // HTML and unknown tokens are shown as written.
    default:
      return make("p", [token.raw]);
  }
}

function isSeen({ type }: Token): boolean {
  return type !== "space";
}

function codeBlock(text: string, language: string): HTMLElement {
  const code = make("code", [text]);
  const pre = make("pre", [code]);
  // Wide code can be scrolled by keyboard too.
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language === "" ? "Code" : `Code, ${language}`);
  const head = make("div", [make("span", [language]), copyButton("Copy code", () => text)]);
  head.className = "code-head";
  const block = make("div", [head, pre]);
  block.className = "code-block";
  return block;
}

function listOf({ ordered, start, items }: Tokens.List): HTMLElement {
  const list = make(
    ordered ? "ol" : "ul",
    items.map((item) => make("li", item.tokens.filter(isSeen).map(listPart))),
  );
  if (list instanceof HTMLOListElement && typeof start === "number" && start !== 1) list.start = start;
  return list;
}

function listPart(token: Token): Node {
  return token.type === "checkbox" ? checkbox((token as Tokens.Checkbox).checked) : blockOf(token);
}

/** A task's state as a character: nothing on the page can be ticked. */
function checkbox(checked: boolean): Node {
  return document.createTextNode(checked ? "☑ " : "☐ ");
}

function tableOf({ header, rows, align }: Tokens.Table): HTMLElement {
  const cell = (kind: "th" | "td", { tokens }: Tokens.TableCell, column: number): HTMLElement => {
    const node = make(kind, inline(tokens));
    if (align[column]) node.className = `to-${align[column]}`;
    return node;
  };
  const head = make(
    "tr",
    header.map((of, column) => cell("th", of, column)),
  );
  const body = rows.map((row) =>
    make(
      "tr",
      row.map((of, column) => cell("td", of, column)),
    ),
  );
  const scroller = make("div", [make("table", [make("thead", [head]), make("tbody", body)])]);
  scroller.className = "table-scroller";
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", "Table");
  return scroller;
}

function inline(tokens: readonly Token[]): Node[] {
  return tokens.map(inlineOf);
}

function inlineOf(any: Token): Node {
  const token = any as MarkedToken;
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return make(token.type, inline(token.tokens));
    case "codespan":
      return make("code", [token.text]);
    case "br":
      return make("br", []);
    case "link":
      return linkTo(token.href, inline(token.tokens), token.raw);
    // Loading a picture would tell its server of the chat: it becomes a link that the person may follow.
    case "image":
      return linkTo(token.href, [token.text || token.href], token.raw);
    case "text":
      return token.tokens ? make("span", inline(token.tokens)) : document.createTextNode(decoded(token.text));
    case "escape":
      return document.createTextNode(token.text);
    case "checkbox":
      return checkbox(token.checked);
    default:
      return document.createTextNode(token.raw);
  }
}

const SAFE = new Set(["https:", "http:", "mailto:"]);

/** Makes a link that leaves the page without a referrer; an unsafe address is shown as written. */
function linkTo(href: string, content: (Node | string)[], raw: string): Node {
  const url = absolute(href);
  if (!url || !SAFE.has(url.protocol)) return document.createTextNode(raw);
  const link = make("a", content);
  link.setAttribute("href", url.href);
  link.setAttribute("target", "_blank");
  link.setAttribute("rel", "noopener noreferrer nofollow");
  return link;
}

/** Parses an absolute address; null for a relative one, which means nothing here. */
function absolute(href: string): URL | null {
  try {
    return new URL(href);
  } catch {
    return null;
  }
}

const ENTITIES: Readonly<Record<string, string>> = {
  "&amp;": "&",
  "&lt;": "<",
  "&gt;": ">",
  "&quot;": '"',
  "&#39;": "'",
  "&nbsp;": "\u00a0",
};

function decoded(text: string): string {
  return text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity] ?? entity);
}

function make(name: string, children: readonly (Node | string)[]): HTMLElement {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}
