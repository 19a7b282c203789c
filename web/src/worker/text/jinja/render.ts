/** Renders the nodes of a template as Jinja2 and Python do. Throws a Fault for whatever is not implemented here. */

import { attribute, binary, called, item, sliced } from "./access.js";
import { filter, globals, test } from "./library.js";
import { Loop } from "./loop.js";
import type { Args, Body, Call, Expr, Node, Signature, Target } from "./nodes.js";
import {
  compare,
  contains,
  equal,
  Fault,
  type Func,
  type Given,
  isDict,
  keyOf,
  misfit,
  Namespace,
  numeric,
  Sequence,
  shown,
  Thing,
  Tuple,
  through,
  truth,
  unfit,
  type Value,
} from "./values.js";

/**
 * The most loop iterations and calls of a rendering; a template takes a few for each message. The limit is the same
 * as in Python's text/templates.py.
 */
const MOST_TURNS = 1_000_000;
const MOST_MS = 10_000;
/** The most characters of a rendered conversation. */
const MOST_CHARACTERS = 16 << 20;
/** The deepest nesting of macro calls; V8's stack has room for about ten times as many. */
const MOST_DEPTH = 200;

type Leave = "break" | "continue" | null;

class Scope {
  readonly values = new Map<string, Value>();

  constructor(readonly outer: Scope | null) {}

  get(name: string): Value {
    for (let scope: Scope | null = this; scope; scope = scope.outer)
      if (scope.values.has(name)) return scope.values.get(name);
    return undefined;
  }
}

class Macro extends Thing {
  constructor(
    readonly name: string,
    override readonly call: Func,
  ) {
    super();
  }

  override attribute(name: string): Value {
    return name === "name" ? this.name : undefined;
  }
}

export function render(body: Body, variables: ReadonlyMap<string, Value>): string {
  const outermost = new Scope(null);
  for (const [name, value] of globals()) outermost.values.set(name, value);
  const given = new Scope(outermost);
  for (const [name, value] of variables) given.values.set(name, value);
  return new Renderer().text(body, new Scope(given));
}

class Renderer {
  #turns = 0;
  readonly #end = performance.now() + MOST_MS;
  #depth = 0;
  #characters = 0;

  text(body: Body, scope: Scope): string {
    const out: string[] = [];
    this.#run(body, scope, out);
    return out.join("");
  }

  #turn(): void {
    if (++this.#turns > MOST_TURNS || (this.#turns % 64 === 0 && performance.now() > this.#end))
      throw new Fault("it takes too long");
  }

  #put(text: string, out: string[]): void {
    this.#characters += text.length;
    bound(this.#characters);
    out.push(text);
  }

  #run(body: Body, scope: Scope, out: string[]): Leave {
    for (const node of body) {
      const leave = this.#node(node, scope, out);
      if (leave) return leave;
    }
    return null;
  }

  #node(node: Node, scope: Scope, out: string[]): Leave {
    switch (node.kind) {
      case "data":
        this.#put(node.text, out);
        return null;
      case "output":
        this.#put(shown(this.#value(node.item, scope)), out);
        return null;
      case "if": {
        const branch = node.branches.find(([test]) => truth(this.#value(test, scope)));
        return this.#run(branch ? branch[1] : node.rest, scope, out);
      }
      case "for":
        this.#put(this.#loop(node, this.#value(node.items, scope), scope, 1), out);
        return null;
      case "break":
      case "continue":
        return node.kind;
      case "set":
        this.#set(node.target, this.#value(node.value, scope), scope);
        return null;
      case "set-block":
        this.#set(
          node.target,
          this.#ofBlock(this.text(node.body, new Scope(scope)), node.filter, scope),
          scope,
        );
        return null;
      case "macro":
        scope.values.set(node.name, new Macro(node.name, this.#macro(node.name, node, node.body, scope)));
        return null;
      case "call-block": {
        const caller = new Macro("caller", this.#macro("caller", node, node.body, scope));
        this.#put(shown(this.#call(node.called, scope, caller)), out);
        return null;
      }
      case "filter-block":
        this.#put(shown(this.#ofBlock(this.text(node.body, new Scope(scope)), node.filter, scope)), out);
        return null;
      case "with": {
        const inner = new Scope(scope);
        for (const [target, value] of node.sets) this.#set(target, this.#value(value, scope), inner);
        return this.#run(node.body, inner, out);
      }
    }
  }

  #loop(node: Extract<Node, { kind: "for" }>, items: Value, scope: Scope, depth: number): string {
    const out: string[] = [];
    // The output of the loop is counted again where the loop's text is put out.
    const counted = this.#characters;
    const wanted = node.test ? new Sequence("generator", this.#wanted(node, items, scope)) : items;
    const again: Func = (args) => {
      if (!node.recursive || args.length !== 1) misfit();
      return this.#deeper(() => this.#loop(node, args[0], scope, depth + 1));
    };
    const loop = new Loop(wanted, depth, again);
    let empty = true;
    for (const one of loop) {
      this.#turn();
      empty = false;
      const inner = new Scope(scope);
      inner.values.set("loop", loop);
      this.#set(node.target, one, inner);
      if (this.#run(node.body, inner, out) === "break") break;
    }
    if (empty) this.#run(node.rest, new Scope(scope), out);
    this.#characters = counted;
    return out.join("");
  }

  /**
   * The items for which the loop's own condition holds. Each condition is evaluated when the loop reaches its item.
   */
  *#wanted(node: Extract<Node, { kind: "for" }>, items: Value, scope: Scope): Iterable<Value> {
    for (const one of through(items)) {
      this.#turn();
      const inner = new Scope(scope);
      this.#set(node.target, one, inner);
      if (!node.test || truth(this.#value(node.test, inner))) yield one;
    }
  }

  #set(target: Target, value: Value, scope: Scope): void {
    if (target.kind === "name") scope.values.set(target.name, value);
    else if (target.kind === "of") {
      const space = scope.get(target.space);
      if (!(space instanceof Namespace)) throw new Fault(`${target.space} is not a namespace`);
      space.values.set(target.name, value);
    } else {
      const values = [...through(value)];
      if (values.length !== target.targets.length) throw new Fault("a wrong number of values");
      for (const [at, one] of target.targets.entries()) this.#set(one, values[at], scope);
    }
  }

  #ofBlock(text: string, filters: Expr | null, scope: Scope): Value {
    if (filters?.kind !== "filter") return text;
    const inner = filters.item ? this.#ofBlock(text, filters.item, scope) : text;
    return filter(filters.name, inner, this.#given(filters, scope));
  }

  #macro(name: string, { names, defaults }: Signature, body: Body, scope: Scope): Func {
    return (args, named) => {
      const inner = new Scope(scope);
      if (args.length > names.length) misfit(name);
      for (const given of named.keys()) if (given !== "caller" && !names.includes(given)) misfit(name);
      names.forEach((one, at) => {
        if (at < args.length && named.has(one)) misfit(name);
        const usual = defaults[at - (names.length - defaults.length)];
        const isGiven = at < args.length || named.has(one);
        const value = at < args.length ? args[at] : named.get(one);
        inner.values.set(one, isGiven || !usual ? value : this.#value(usual, inner));
      });
      if (!names.includes("caller") && named.has("caller")) inner.values.set("caller", named.get("caller"));
      const counted = this.#characters;
      const made = this.#deeper(() => this.text(body, inner));
      this.#characters = counted;
      return made;
    };
  }

  #deeper<T>(run: () => T): T {
    if (++this.#depth > MOST_DEPTH) throw new Fault("its macros are too deep");
    try {
      return run();
    } finally {
      this.#depth--;
    }
  }

  #given({ args, named, rest, more }: Args, scope: Scope): Given {
    const values = args.map((one) => this.#value(one, scope));
    if (rest) values.push(...through(this.#value(rest, scope)));
    const names = new Map(named.map(([name, one]) => [name, this.#value(one, scope)]));
    const others = more ? this.#value(more, scope) : null;
    if (others !== null && !isDict(others)) unfit(others, "after ** is not a dict");
    for (const [name, one] of others ?? []) names.set(String(name), one);
    return { args: values, named: names };
  }

  #call(node: Call, scope: Scope, caller?: Macro): Value {
    this.#turn();
    const { args, named } = this.#given(node, scope);
    const more = caller ? new Map([...named, ["caller", caller] as const]) : named;
    return called(this.#value(node.called, scope), args, more, nameOf(node.called));
  }

  #compared(node: Extract<Expr, { kind: "compare" }>, scope: Scope): boolean {
    let left = this.#value(node.first, scope);
    for (const [sign, expr] of node.rest) {
      const right = this.#value(expr, scope);
      if (!holds(sign, left, right)) return false;
      left = right;
    }
    return true;
  }

  #value(node: Expr, scope: Scope): Value {
    switch (node.kind) {
      case "const":
        return node.value;
      case "name":
        return scope.get(node.name);
      case "tuple":
        return new Tuple(node.items.map((one) => this.#value(one, scope)));
      case "list":
        return node.items.map((one) => this.#value(one, scope));
      case "dict":
        return new Map(
          node.pairs.map(([key, one]) => [keyOf(this.#value(key, scope)), this.#value(one, scope)]),
        );
      case "concat":
        return bounded(node.items.map((one) => shown(this.#value(one, scope))).join(""));
      case "choice":
        if (truth(this.#value(node.test, scope))) return this.#value(node.yes, scope);
        return node.no ? this.#value(node.no, scope) : undefined;
      case "and":
      case "or": {
        const left = this.#value(node.left, scope);
        return truth(left) === (node.kind === "or") ? left : this.#value(node.right, scope);
      }
      case "not":
        return !truth(this.#value(node.item, scope));
      case "sign": {
        const number = numeric(this.#value(node.item, scope));
        if (number === null) throw new Fault(`${node.sign} before what is not a number`);
        return node.sign === "-" ? -number : number;
      }
      case "binary": {
        const made = binary(node.sign, this.#value(node.left, scope), this.#value(node.right, scope));
        return typeof made === "string" ? bounded(made) : made;
      }
      case "compare":
        return this.#compared(node, scope);
      case "attribute":
        return attribute(this.#value(node.item, scope), node.name, nameOf(node.item));
      case "item":
        return item(this.#value(node.item, scope), this.#value(node.place, scope), nameOf(node.item));
      case "slice": {
        const bounds = node.bounds.map((one) => (one ? this.#value(one, scope) : null));
        return sliced(this.#value(node.item, scope), bounds);
      }
      case "call":
        return this.#call(node, scope);
      case "filter": {
        this.#turn();
        const value = node.item ? this.#value(node.item, scope) : undefined;
        return filter(node.name, value, this.#given(node, scope));
      }
      case "test":
        return test(node.name, this.#value(node.item, scope), this.#given(node, scope));
    }
  }
}

function holds(sign: string, left: Value, right: Value): boolean {
  if (sign === "==") return equal(left, right);
  if (sign === "!=") return !equal(left, right);
  if (sign === "in") return contains(right, left);
  if (sign === "not in") return !contains(right, left);
  const order = compare(left, right);
  if (sign === "<") return order < 0;
  if (sign === ">") return order > 0;
  return sign === "<=" ? order <= 0 : order >= 0;
}

function bounded(text: string): string {
  bound(text.length);
  return text;
}

function bound(characters: number): void {
  if (characters > MOST_CHARACTERS) throw new Fault("it makes too long a text");
}

/** The name of a value in the template, for messages. */
function nameOf(node: Expr): string {
  if (node.kind === "name") return node.name;
  return node.kind === "attribute" ? `${nameOf(node.item)}.${node.name}` : "a value";
}
