/** The nodes of a parsed template: those of Jinja2's syntax tree that chat templates use. */

import type { Value } from "./values.js";

export interface Args {
  readonly args: readonly Expr[];
  readonly named: readonly (readonly [string, Expr])[];
  /** The arguments `*rest` and `**more`. */
  readonly rest: Expr | null;
  readonly more: Expr | null;
}

export type Expr =
  | { readonly kind: "const"; readonly value: Value }
  | { readonly kind: "name"; readonly name: string }
  | { readonly kind: "tuple" | "list" | "concat"; readonly items: readonly Expr[] }
  | { readonly kind: "dict"; readonly pairs: readonly (readonly [Expr, Expr])[] }
  | { readonly kind: "choice"; readonly test: Expr; readonly yes: Expr; readonly no: Expr | null }
  | { readonly kind: "and" | "or"; readonly left: Expr; readonly right: Expr }
  | { readonly kind: "not"; readonly item: Expr }
  | { readonly kind: "sign"; readonly sign: "+" | "-"; readonly item: Expr }
  | { readonly kind: "binary"; readonly sign: string; readonly left: Expr; readonly right: Expr }
  | { readonly kind: "compare"; readonly first: Expr; readonly rest: readonly (readonly [string, Expr])[] }
  | { readonly kind: "attribute"; readonly item: Expr; readonly name: string }
  | { readonly kind: "item"; readonly item: Expr; readonly place: Expr }
  | { readonly kind: "slice"; readonly item: Expr; readonly bounds: readonly (Expr | null)[] }
  | ({ readonly kind: "call"; readonly called: Expr } & Args)
  /** `item` is null in the filter of a `filter` block. */
  | ({ readonly kind: "filter"; readonly item: Expr | null; readonly name: string } & Args)
  | ({ readonly kind: "test"; readonly item: Expr; readonly name: string } & Args);

export type Call = Extract<Expr, { kind: "call" }>;

/** The left side of an assignment: a name, `namespace.name`, or several of these. */
export type Target =
  | { readonly kind: "name"; readonly name: string }
  | { readonly kind: "of"; readonly space: string; readonly name: string }
  | { readonly kind: "several"; readonly targets: readonly Target[] };

export interface Signature {
  readonly names: readonly string[];
  /** Default values of the last names. */
  readonly defaults: readonly Expr[];
}

export type Body = readonly Node[];

export type Node =
  | { readonly kind: "data"; readonly text: string }
  | { readonly kind: "output"; readonly item: Expr }
  | { readonly kind: "if"; readonly branches: readonly (readonly [Expr, Body])[]; readonly rest: Body }
  | {
      readonly kind: "for";
      readonly target: Target;
      readonly items: Expr;
      readonly test: Expr | null;
      readonly recursive: boolean;
      readonly body: Body;
      readonly rest: Body;
    }
  | { readonly kind: "break" | "continue" }
  | { readonly kind: "set"; readonly target: Target; readonly value: Expr }
  | { readonly kind: "set-block"; readonly target: Target; readonly filter: Expr | null; readonly body: Body }
  | ({ readonly kind: "macro"; readonly name: string; readonly body: Body } & Signature)
  | ({ readonly kind: "call-block"; readonly called: Call; readonly body: Body } & Signature)
  | { readonly kind: "filter-block"; readonly filter: Expr; readonly body: Body }
  | { readonly kind: "with"; readonly sets: readonly (readonly [Target, Expr])[]; readonly body: Body };
