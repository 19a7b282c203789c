/** Parses the expressions of a template, with Jinja2's operator precedence. */

import type { Token } from "./lexer.js";
import { TemplateError } from "./lexer.js";
import type { Args, Expr, Target } from "./nodes.js";
import type { Value } from "./values.js";

const CONSTANTS: ReadonlyMap<string, Value> = new Map<string, Value>([
  ["true", true],
  ["True", true],
  ["false", false],
  ["False", false],
  ["none", null],
  ["None", null],
]);
const COMPARISONS: ReadonlySet<string> = new Set(["==", "!=", "<", "<=", ">", ">="]);
const NO_ARGS: Args = { args: [], named: [], rest: null, more: null };

/** A parser's position among the tokens. */
export class Cursor {
  #at = 0;

  constructor(private readonly tokens: readonly Token[]) {}

  get token(): Token {
    return this.ahead(0);
  }

  ahead(by: number): Token {
    return this.tokens[this.#at + by] ?? { kind: "eof", text: "", line: 0 };
  }

  next(): Token {
    const { token } = this;
    this.#at++;
    return token;
  }

  is(kind: Token["kind"], text?: string): boolean {
    return this.token.kind === kind && (text === undefined || this.token.text === text);
  }

  /** Skips the token if it stands here; returns whether it did. */
  skip(kind: Token["kind"], text?: string): boolean {
    const found = this.is(kind, text);
    if (found) this.#at++;
    return found;
  }

  expect(kind: Token["kind"], text?: string): Token {
    if (!this.is(kind, text))
      this.fail(`${text ?? kind} expected, found ${this.token.text || this.token.kind}`);
    return this.next();
  }

  fail(what: string): never {
    throw new TemplateError(`${what} in line ${this.token.line}`);
  }
}

export class ExpressionParser {
  constructor(protected readonly at: Cursor) {}

  expression(withChoice = true): Expr {
    return withChoice ? this.#choice() : this.#or();
  }

  #op(...signs: string[]): string | null {
    const { token } = this.at;
    if (token.kind !== "operator" || !signs.includes(token.text)) return null;
    return this.at.next().text;
  }

  #choice(): Expr {
    let made = this.#or();
    while (this.at.skip("name", "if")) {
      const test = this.#or();
      made = { kind: "choice", test, yes: made, no: this.at.skip("name", "else") ? this.#choice() : null };
    }
    return made;
  }

  #or(): Expr {
    let left = this.#and();
    while (this.at.skip("name", "or")) left = { kind: "or", left, right: this.#and() };
    return left;
  }

  #and(): Expr {
    let left = this.#not();
    while (this.at.skip("name", "and")) left = { kind: "and", left, right: this.#not() };
    return left;
  }

  #not(): Expr {
    return this.at.skip("name", "not") ? { kind: "not", item: this.#not() } : this.#compare();
  }

  #compare(): Expr {
    const first = this.#sum();
    const rest: [string, Expr][] = [];
    for (;;) {
      const sign = this.#op(...COMPARISONS);
      if (sign) rest.push([sign, this.#sum()]);
      else if (this.at.skip("name", "in")) rest.push(["in", this.#sum()]);
      else if (
        this.at.is("name", "not") &&
        this.at.ahead(1).kind === "name" &&
        this.at.ahead(1).text === "in"
      ) {
        this.at.next();
        this.at.next();
        rest.push(["not in", this.#sum()]);
      } else return rest.length > 0 ? { kind: "compare", first, rest } : first;
    }
  }

  #binary(signs: readonly string[], operand: () => Expr): Expr {
    let left = operand();
    for (let sign = this.#op(...signs); sign; sign = this.#op(...signs))
      left = { kind: "binary", sign, left, right: operand() };
    return left;
  }

  #sum(): Expr {
    return this.#binary(["+", "-"], () => this.#concat());
  }

  #concat(): Expr {
    const items = [this.#product()];
    while (this.#op("~")) items.push(this.#product());
    return items.length > 1 ? { kind: "concat", items } : (items[0] as Expr);
  }

  #product(): Expr {
    return this.#binary(["*", "/", "//", "%"], () => this.#power());
  }

  #power(): Expr {
    return this.#binary(["**"], () => this.#unary(true));
  }

  #unary(withFilters: boolean): Expr {
    const sign = this.#op("-", "+");
    const inner: Expr = sign
      ? { kind: "sign", sign: sign as "+" | "-", item: this.#unary(false) }
      : this.primary();
    const made = this.postfix(inner);
    return withFilters ? this.#filtered(made) : made;
  }

  primary(): Expr {
    const token = this.at.next();
    const { kind, text } = token;
    if (kind === "name")
      return CONSTANTS.has(text)
        ? { kind: "const", value: CONSTANTS.get(text) }
        : { kind: "name", name: text };
    if (kind === "string") {
      let value = text;
      while (this.at.is("string")) value += this.at.next().text;
      return { kind: "const", value };
    }
    if (kind === "integer") return { kind: "const", value: BigInt(text) };
    if (kind === "float") return { kind: "const", value: Number(text) };
    if (kind === "operator" && text === "(") {
      const made = this.tuple({ parenthesized: true });
      this.at.expect("operator", ")");
      return made;
    }
    if (kind === "operator" && text === "[")
      return { kind: "list", items: this.#listed("]", () => this.expression()) };
    if (kind === "operator" && text === "{")
      return {
        kind: "dict",
        pairs: this.#listed("}", () => {
          const key = this.expression();
          this.at.expect("operator", ":");
          return [key, this.expression()] as const;
        }),
      };
    return this.at.fail(`unexpected ${text || kind}`);
  }

  /** Parses a list of items between commas, up to a closing sign. */
  #listed<T>(end: string, read: () => T): T[] {
    const made: T[] = [];
    while (!this.at.is("operator", end)) {
      if (made.length > 0) this.at.expect("operator", ",");
      if (this.at.is("operator", end)) break;
      made.push(read());
    }
    this.at.next();
    return made;
  }

  /** Parses one expression, or a tuple of several between commas. `end` is a name that ends it. */
  tuple(options: { withChoice?: boolean; parenthesized?: boolean; end?: string } = {}): Expr {
    const { withChoice = true, parenthesized = false, end } = options;
    const ends = () =>
      this.at.is("end") || this.at.is("operator", ")") || (end !== undefined && this.at.is("name", end));
    const items: Expr[] = [];
    let several = false;
    while (!ends()) {
      items.push(this.expression(withChoice));
      if (!this.at.skip("operator", ",")) break;
      several = true;
    }
    const [only] = items;
    if (!several && only) return only;
    if (!several && !parenthesized) this.at.fail("an expression is missing");
    return { kind: "tuple", items };
  }

  target(withSpaces = false): Target {
    const targets: Target[] = [];
    let several = false;
    const ends = () => this.at.is("end") || this.at.is("operator", ")") || this.at.is("name", "in");
    while (!ends()) {
      targets.push(this.#oneTarget(withSpaces));
      if (!this.at.skip("operator", ",")) break;
      several = true;
    }
    const [only] = targets;
    if (!only) this.at.fail("a name to set is missing");
    return several ? { kind: "several", targets } : only;
  }

  #oneTarget(withSpaces: boolean): Target {
    if (this.at.skip("operator", "(")) {
      const made = this.target(withSpaces);
      this.at.expect("operator", ")");
      return made;
    }
    const { text } = this.at.expect("name");
    if (CONSTANTS.has(text)) this.at.fail(`${text} cannot be set`);
    if (withSpaces && this.at.skip("operator", "."))
      return { kind: "of", space: text, name: this.at.expect("name").text };
    return { kind: "name", name: text };
  }

  postfix(begun: Expr): Expr {
    let made = begun;
    for (;;) {
      if (this.#op(".")) made = this.#attribute(made);
      else if (this.#op("[")) made = this.#item(made);
      else if (this.at.is("operator", "(")) made = { kind: "call", called: made, ...this.args() };
      else return made;
    }
  }

  #attribute(item: Expr): Expr {
    const { kind, text } = this.at.next();
    if (kind === "name") return { kind: "attribute", item, name: text };
    if (kind === "integer") return { kind: "item", item, place: { kind: "const", value: BigInt(text) } };
    return this.at.fail("a name or number expected");
  }

  #item(item: Expr): Expr {
    const bounds: (Expr | null)[] = [null];
    for (; !this.at.is("operator", "]"); ) {
      if (this.#op(":")) bounds.push(null);
      else if (bounds.at(-1) === null) bounds[bounds.length - 1] = this.expression();
      else this.at.fail("one place expected");
    }
    this.at.next();
    const [place] = bounds;
    if (bounds.length > 3 || (bounds.length === 1 && !place)) this.at.fail("a place expected");
    if (bounds.length === 1 && place) return { kind: "item", item, place };
    return { kind: "slice", item, bounds };
  }

  #filtered(begun: Expr): Expr {
    let made = begun;
    for (;;) {
      if (this.at.is("operator", "|")) made = this.filters(made) as Expr;
      else if (this.at.skip("name", "is")) made = this.#test(made);
      else if (this.at.is("operator", "(")) made = { kind: "call", called: made, ...this.args() };
      else return made;
    }
  }

  /** Parses the filters that follow an expression. `inline` says that the first filter has no | before it. */
  filters(begun: Expr | null, inline = false): Expr | null {
    let made = begun;
    for (let first = inline; first || this.#op("|"); first = false) {
      const name = this.#dotted();
      const given = this.at.is("operator", "(") ? this.args() : NO_ARGS;
      made = { kind: "filter", item: made, name, ...given };
    }
    return made;
  }

  #dotted(): string {
    let { text } = this.at.expect("name");
    while (this.#op(".")) text += `.${this.at.expect("name").text}`;
    return text;
  }

  #test(item: Expr): Expr {
    const negated = this.at.skip("name", "not");
    const name = this.#dotted();
    let given = NO_ARGS;
    if (this.at.is("operator", "(")) given = this.args();
    else if (this.#isArgument()) given = { ...NO_ARGS, args: [this.postfix(this.primary())] };
    const made: Expr = { kind: "test", item, name, ...given };
    return negated ? { kind: "not", item: made } : made;
  }

  #isArgument(): boolean {
    const { kind, text } = this.at.token;
    if (kind === "name") {
      if (text === "is") this.at.fail("tests cannot follow each other");
      return !["else", "or", "and"].includes(text);
    }
    if (kind === "operator") return "([{".includes(text);
    return kind === "string" || kind === "integer" || kind === "float";
  }

  args(): Args {
    this.at.expect("operator", "(");
    const args: Expr[] = [];
    const named: [string, Expr][] = [];
    let rest: Expr | null = null;
    let more: Expr | null = null;
    this.#listed(")", () => {
      const next = this.at.ahead(1);
      if (!more && !rest && this.#op("*")) rest = this.expression();
      else if (!more && this.#op("**")) more = this.expression();
      else if (!more && this.at.is("name") && next.kind === "operator" && next.text === "=") {
        const name = this.at.next().text;
        this.at.next();
        named.push([name, this.expression()]);
      } else if (!more && !rest && named.length === 0) args.push(this.expression());
      else this.at.fail("arguments in a wrong order");
    });
    return { args, named, rest, more };
  }
}
