import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { Breaker, type Pass } from "../src/routing/breaker.js";
import { limitFor, Threshold } from "../src/routing/calibration.js";
import { decide } from "../src/routing/decide.js";
import { parseRouter, rowTokens } from "../src/routing/fitted.js";
import { ANSWERS, type Knowledge, SURE } from "../src/routing/knowledge.js";
import { Ledger } from "../src/routing/ledger.js";
import { type First, Monitor } from "../src/routing/monitor.js";
import { DEFAULT_POLICY, type PolicyOptions, parsePolicy } from "../src/routing/policy.js";
import { backoff, RetryBudget } from "../src/routing/retry.js";
import type { RouterModel } from "../src/routing/router-model.js";
import { Speeds } from "../src/routing/speed.js";
import type { CloudState, DeviceState, RouteDecision, RouteRequest } from "../src/routing/types.js";

/** The cases and scenarios that Python also passes; tests/vectors/routing/record.py writes them. */
const VECTORS = new URL("../../tests/vectors/routing/", import.meta.url);

interface Case {
  readonly name: string;
  readonly request: RouteRequest;
  readonly device: DeviceState;
  readonly cloud: CloudState;
  readonly policy: PolicyOptions;
  readonly decision: RouteDecision;
}

/** Arguments of the operations; each operation has some of them. */
interface Args {
  readonly attempt: number;
  readonly conversation: string | null;
  readonly cost: number;
  readonly day: string;
  readonly difficulty: number;
  readonly given: Pass;
  readonly logprob: number | null;
  readonly now: number;
  readonly number: number;
  readonly random: number;
  readonly retry_after: number | null;
  readonly seconds: number;
  readonly share: number;
  readonly text: string;
  readonly tokens: number;
  readonly top: readonly number[];
  readonly uncached_tokens: number;
  readonly values: readonly number[];
}

interface Config {
  readonly share?: number;
  readonly start?: number;
  readonly options?: object;
}

interface Step {
  readonly op: string;
  readonly args: Args;
  readonly result: unknown;
  readonly state: unknown;
}

interface Scenario {
  readonly name: string;
  readonly config: Config;
  readonly steps: readonly Step[];
}

/** Runs one operation; gives its result and the state after it. */
type Machine = (op: string, args: Args) => readonly [result: unknown, state: unknown];

function read<T>(name: string): readonly T[] {
  return JSON.parse(readFileSync(new URL(`${name}.json`, VECTORS), "utf8")) as T[];
}

function unknownOperation(op: string): never {
  throw new Error(`unknown operation ${op}`);
}

const MACHINES: Record<string, (config: Config) => Machine> = {
  breaker: (config) => {
    const made = new Breaker({ ...DEFAULT_POLICY.breaker, ...config });
    const run = (op: string, { given, now, seconds }: Args): unknown => {
      if (op === "begin") return made.begin(now);
      if (op === "success") return made.success(given);
      if (op === "failure") return made.failure(now, given);
      if (op === "abandoned") return made.abandoned(given);
      if (op === "hold") return made.hold(now, seconds);
      return op === "look" ? null : unknownOperation(op);
    };
    return (op, args) => {
      const result = run(op, args);
      const now = args.now ?? 0;
      return [
        result,
        { state: made.state(now), allows: made.allows(now), retry_after: made.retryAfter(now) },
      ];
    };
  },
  retry: (config) => {
    const options = { ...DEFAULT_POLICY.retry, ...config };
    const budget = new RetryBudget(options);
    const run = (op: string, { attempt, random, retry_after }: Args): unknown => {
      if (op === "backoff") return backoff(attempt, random, retry_after, options);
      if (op === "request") return budget.request();
      return op === "withdraw" ? budget.withdraw() : unknownOperation(op);
    };
    return (op, args) => [run(op, args), { left: budget.left }];
  },
  calibration: ({ share = 0, start = 0, options = {} }) => {
    const made = new Threshold(share, start, { ...DEFAULT_POLICY.calibration, ...options });
    const run = (op: string, args: Args): unknown => {
      if (op === "observe") return made.observe(args.difficulty);
      return op === "limit_for" ? limitFor(args.values, args.share) : unknownOperation(op);
    };
    return (op, args) => [run(op, args), made.record()];
  },
  confidence: (config) => {
    const made = new Monitor({ ...DEFAULT_POLICY.monitor, ...config });
    return (op, args) => {
      if (op !== "push") unknownOperation(op);
      const found = made.push(args);
      const state = { lowest_logprob: made.lowestLogprob, highest_entropy: made.highestEntropy };
      return [found && { code: found.code, value: found.value, limit: found.limit }, state];
    };
  },
  ledger: () => {
    const made = new Ledger();
    const run = (op: string, { conversation, cost, number, day }: Args): unknown => {
      if (op === "reserve") return made.reserve(conversation, cost);
      if (op === "settle") return made.settle(number, day, cost);
      if (op === "spent_day") return made.spentDay(day);
      return op === "spent_conversation" ? made.spentConversation(conversation) : unknownOperation(op);
    };
    return (op, args) => [run(op, args), made.record()];
  },
  speed: () => {
    const made = new Speeds();
    return (op, { tokens, seconds, uncached_tokens }) => {
      if (op === "prefill") made.prefill(tokens, seconds);
      else if (op === "decode") made.decode(tokens, seconds);
      else if (op === "first_token") made.firstToken(seconds, uncached_tokens);
      else unknownOperation(op);
      return [null, made.record()];
    };
  },
};

/** Rounds numbers to 1e-9, because exp and log may differ in their last bit between languages. */
function rounded(value: unknown): unknown {
  if (typeof value === "number") return Number(value.toPrecision(9));
  if (Array.isArray(value)) return value.map(rounded);
  if (typeof value !== "object" || value === null) return value ?? null;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, rounded(item)]));
}

describe.each(["decision", "decision_random"])("%s", (file) => {
  test.each(read<Case>(file).map((item) => [item.name, item] as const))("%s", (_, item) => {
    const found = decide(item.request, item.device, item.cloud, parsePolicy(item.policy));
    expect(rounded(found)).toEqual(rounded(item.decision));
  });
});

describe.each(Object.keys(MACHINES))("%s", (file) => {
  test.each(read<Scenario>(file).map((item) => [item.name, item] as const))("%s", (_, { config, steps }) => {
    const machine = MACHINES[file]?.(config);
    steps.forEach(({ op, args, result, state }, at) => {
      const [found, after] = machine?.(op, args) ?? [];
      expect(rounded(found), `result of step ${at}, ${op}`).toEqual(rounded(result));
      expect(rounded(after), `state after step ${at}, ${op}`).toEqual(rounded(state));
    });
  });
});

/** Routers that `fitted.ts` must judge and reject as Python does. */
interface Routers {
  readonly router: RouterModel;
  readonly cases: readonly {
    readonly knowledge: Knowledge;
    readonly first: readonly First[];
    readonly ended: boolean;
    readonly gain: number;
    readonly doubt: object | null;
  }[];
  readonly refused: readonly object[];
  readonly row_tokens: Readonly<Record<string, readonly number[]>>;
  readonly asked_tokens: readonly number[];
  readonly sure: { readonly question: string; readonly answers: readonly string[] };
}
const ROUTERS = JSON.parse(readFileSync(new URL("router.json", VECTORS), "utf8")) as Routers;

describe("a fitted router", () => {
  test("judges prompts and beginnings of answers", () => {
    const made = parseRouter(ROUTERS.router);
    for (const { knowledge, first, ended, gain, doubt } of ROUTERS.cases) {
      expect(rounded(made.gain(knowledge))).toEqual(rounded(gain));
      expect(rounded(made.doubt(knowledge, first, ended))).toEqual(rounded(doubt));
    }
  });

  test("asks the model as Python does", () => {
    expect({ question: SURE, answers: ANSWERS }).toEqual(ROUTERS.sure);
    const { wanted } = parseRouter(ROUTERS.router);
    expect(wanted).toEqual({ ask: true, perplexity: true, tokens: ROUTERS.asked_tokens });
    for (const [size, tokens] of Object.entries(ROUTERS.row_tokens))
      expect(rowTokens(Number(size)), size).toEqual(tokens);
  });

  test.each(ROUTERS.refused.map((change) => [JSON.stringify(change), change] as const))(
    "refuses %s",
    (_, change) => {
      const refusal = {
        name: "RequestError",
        param: "router",
        message: expect.stringMatching(/is not a router: /),
      };
      expect(() => parseRouter({ ...ROUTERS.router, ...change })).toThrow(expect.objectContaining(refusal));
    },
  );
});

test("the policy's defaults are Python's", () => {
  expect(parsePolicy()).toEqual(JSON.parse(readFileSync(new URL("policy.json", VECTORS), "utf8")));
});

test.each(
  read<{ policy: PolicyOptions; param: string }>("policy_refused").map(
    (item) => [JSON.stringify(item.policy), item] as const,
  ),
)("%s is refused by name", (_, { policy, param }) => {
  expect(() => parsePolicy(policy)).toThrow(expect.objectContaining({ name: "RequestError", param }));
});
