/** Parses the tags of a template into nodes, as Jinja2's parser does. */

import { Cursor, ExpressionParser } from "./expressions.js";
import { tokenize } from "./lexer.js";
import type { Body, Expr, Node, Signature, Target } from "./nodes.js";

/** Parses a template. Throws TemplateError if it is invalid. */
export function parse(template: string): Body {
  return new Parser(new Cursor(tokenize(template))).all();
}

class Parser extends ExpressionParser {
  all(): Body {
    return this.#body([]);
  }

  /** Parses nodes up to a tag named in `ends`. The cursor then stands at that name. */
  #body(ends: readonly string[]): Body {
    const made: Node[] = [];
    for (;;) {
      const { kind, text } = this.at.next();
      if (kind === "data") made.push({ kind: "data", text });
      else if (kind === "begin" && text === "{") {
        made.push({ kind: "output", item: this.tuple() });
        this.at.expect("end");
      } else if (kind === "begin") {
        if (this.at.is("name") && ends.includes(this.at.token.text)) return made;
        made.push(this.#statement());
        this.at.expect("end");
      } else if (kind === "eof" && ends.length === 0) return made;
      else this.at.fail(ends.length > 0 ? `${ends.join(" or ")} is missing` : `unexpected ${text || kind}`);
    }
  }

  /** Parses the body of the tag whose name has just been read, up to its end tag. */
  #inner(end: string): Body {
    this.at.expect("end");
    const body = this.#body([end]);
    this.at.next();
    return body;
  }

  #statement(): Node {
    const name = this.at.expect("name").text;
    if (name === "break" || name === "continue") return { kind: name };
    if (name === "if") return this.#if();
    if (name === "for") return this.#for();
    if (name === "set") return this.#set();
    if (name === "macro") return this.#macro();
    if (name === "call") return this.#call();
    if (name === "with") return this.#with();
    // transformers uses this tag to mark text for training. It does not change the text, and it opens a scope.
    if (name === "generation") return { kind: "with", sets: [], body: this.#inner("endgeneration") };
    if (name === "filter") {
      const filter = this.filters(null, true) as Expr;
      return { kind: "filter-block", filter, body: this.#inner("endfilter") };
    }
    return this.at.fail(`the tag ${name} is not known`);
  }

  #if(): Node {
    const branches: [Expr, Body][] = [];
    for (;;) {
      const test = this.tuple({ withChoice: false });
      this.at.expect("end");
      branches.push([test, this.#body(["elif", "else", "endif"])]);
      const { text } = this.at.next();
      if (text === "elif") continue;
      const rest = text === "else" ? this.#inner("endif") : [];
      return { kind: "if", branches, rest };
    }
  }

  #for(): Node {
    const target = this.target();
    this.at.expect("name", "in");
    const items = this.tuple({ withChoice: false, end: "recursive" });
    const test = this.at.skip("name", "if") ? this.expression() : null;
    const recursive = this.at.skip("name", "recursive");
    this.at.expect("end");
    const body = this.#body(["endfor", "else"]);
    const rest = this.at.next().text === "else" ? this.#inner("endfor") : [];
    return { kind: "for", target, items, test, recursive, body, rest };
  }

  #set(): Node {
    const target = this.target(true);
    if (this.at.skip("operator", "=")) return { kind: "set", target, value: this.tuple() };
    const filter = this.filters(null);
    return { kind: "set-block", target, filter, body: this.#inner("endset") };
  }

  #signature(): Signature {
    const names: string[] = [];
    const defaults: Expr[] = [];
    this.at.expect("operator", "(");
    while (!this.at.is("operator", ")")) {
      if (names.length > 0) this.at.expect("operator", ",");
      names.push(this.at.expect("name").text);
      if (this.at.skip("operator", "=")) defaults.push(this.expression());
      else if (defaults.length > 0) this.at.fail("a name without a default follows one with a default");
    }
    this.at.next();
    return { names, defaults };
  }

  #macro(): Node {
    const name = this.at.expect("name").text;
    return { kind: "macro", name, ...this.#signature(), body: this.#inner("endmacro") };
  }

  #call(): Node {
    const signature = this.at.is("operator", "(") ? this.#signature() : { names: [], defaults: [] };
    const called = this.expression();
    if (called.kind !== "call") this.at.fail("a call expected");
    return { kind: "call-block", called, ...signature, body: this.#inner("endcall") };
  }

  #with(): Node {
    const sets: [Target, Expr][] = [];
    while (!this.at.is("end")) {
      if (sets.length > 0) this.at.expect("operator", ",");
      const target = this.target();
      this.at.expect("operator", "=");
      sets.push([target, this.expression()]);
    }
    return { kind: "with", sets, body: this.#inner("endwith") };
  }
}
