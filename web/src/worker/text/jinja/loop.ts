/** The value `loop` of a template's for loop. */

import { equal, type Func, isList, misfit, Sequence, size, Thing, through, type Value } from "./values.js";

const NOTHING = Symbol("nothing");

/**
 * Iterates over the items and looks at most one item ahead, because a loop's condition may depend on what its body
 * did.
 */
export class Loop extends Thing implements Iterable<Value> {
  readonly #items: Value;
  #rest: Iterator<Value>;
  #at = -1;
  #length: number | null = null;
  #ahead: Value | typeof NOTHING = NOTHING;
  #before: Value = undefined;
  #current: Value = undefined;
  #changed: readonly Value[] | null = null;

  constructor(
    items: Value,
    private readonly depth: number,
    override readonly call: Func,
  ) {
    super();
    this.#items = items;
    this.#rest = through(items)[Symbol.iterator]();
  }

  *[Symbol.iterator](): Iterator<Value> {
    for (;;) {
      const next = this.#next();
      if (next === NOTHING) return;
      this.#before = this.#current;
      this.#current = next;
      this.#at++;
      yield next;
    }
  }

  #next(): Value | typeof NOTHING {
    const ahead = this.#ahead;
    this.#ahead = NOTHING;
    if (ahead !== NOTHING) return ahead;
    const { done, value } = this.#rest.next();
    return done ? NOTHING : value;
  }

  #peek(): Value | typeof NOTHING {
    if (this.#ahead === NOTHING) this.#ahead = this.#next();
    return this.#ahead;
  }

  get #size(): number {
    if (this.#length !== null) return this.#length;
    if (!(this.#items instanceof Sequence) || this.#items.kind !== "generator")
      this.#length = size(this.#items);
    else {
      const rest: Value[] = [];
      for (let next = this.#next(); next !== NOTHING; next = this.#next()) rest.push(next);
      this.#rest = rest[Symbol.iterator]();
      this.#length = this.#at + 1 + rest.length;
    }
    return this.#length;
  }

  override attribute(name: string): Value {
    const at = this.#at;
    if (name === "index") return BigInt(at + 1);
    if (name === "index0") return BigInt(at);
    if (name === "revindex") return BigInt(this.#size - at);
    if (name === "revindex0") return BigInt(this.#size - at - 1);
    if (name === "first") return at === 0;
    if (name === "last") return this.#peek() === NOTHING;
    if (name === "length") return BigInt(this.#size);
    if (name === "depth") return BigInt(this.depth);
    if (name === "depth0") return BigInt(this.depth - 1);
    if (name === "previtem") return at === 0 ? undefined : this.#before;
    if (name === "nextitem") {
      const next = this.#peek();
      return next === NOTHING ? undefined : next;
    }
    if (name === "cycle") return (args) => this.#cycle(args);
    if (name === "changed") return (args) => this.#hasChanged(args);
    return undefined;
  }

  #cycle(args: readonly Value[]): Value {
    if (args.length === 0) misfit();
    return args[this.#at % args.length];
  }

  #hasChanged(args: readonly Value[]): boolean {
    const before = this.#changed;
    this.#changed = args;
    return before === null || !isList(args) || !equal(before, args);
  }
}
