/**
 * The hand-over as a table: (phase, event) → next state and actions. The Python version is the same; both
 * replay the same scripts.
 *
 * The table is pure: it has no clock, no text, no I/O. A driver reports events and performs the actions: it
 * asks the router whether a side may take over, calls the side, shows pieces. What has been shown is never
 * taken back; after a finish no side continues.
 */

import type { Policy } from "./policy.js";
import { type Reason, type RouteDecision, reason, type Side } from "./types.js";

/**
 * racing: both sides answer, nothing is shown yet. asking: the router decides whether a side may take over.
 * finished: the answer is complete, and its side still reports its usage.
 */
export type Phase = "idle" | "answering" | "racing" | "asking" | "finished" | "over";
export type EventKind =
  | "start"
  | "piece"
  | "ended"
  | "failed"
  | "refused"
  | "silent"
  | "admitted"
  | "barred"
  | "left";
export type SettledAs = "ok" | "failed" | "refused" | "left";
type Why = "failed" | "refused" | "unwatched" | "low" | "hedge";

/** Codes of failures that a second try does not change. */
const FINAL = ["401", "403", "404", "shape", "no_continuation"];

/**
 * Settings that stay the same during an answer. `plain`: the text is all that another side must know to
 * continue. `watched`: the device's monitor may escalate to the cloud; `restart`: the escalated answer begins
 * again while nothing is shown; `hold`: tokens that are held back for that. `hedge`: the side that is started
 * in addition after `hedge_seconds` of silence.
 */
export interface Rules {
  readonly max_tokens: number;
  readonly plain: boolean;
  readonly private: boolean;
  readonly watched: boolean;
  readonly restart: boolean;
  readonly hold: number;
  readonly hedge: Side | null;
  readonly hedge_seconds: number | null;
  readonly after_cut: Side;
  readonly before_fallback: number;
}

/**
 * An event. piece: `tokens` of the answer (1), the last one with a `finish`; `low`: why the monitor flagged
 * it. failed: `code` is the kind of failure. refused: `code` is the rejected parameter; `unwatched`: only the
 * monitor wanted the rejected logprobs.
 */
export interface HandoverEvent {
  readonly on: EventKind;
  readonly side?: Side | null;
  readonly tokens?: number;
  readonly plain?: boolean;
  readonly finish?: string | null;
  readonly low?: Reason | null;
  readonly code?: string | null;
  readonly unwatched?: boolean;
}

/**
 * An action of the driver: "open" starts a side; "settle" ends its part and accounts for it; "admit" and
 * "retry" ask the router whether a side may take over, "retry" after a wait (the answer is an event); "hold"
 * holds the piece back; "show" shows the held pieces and this one; "show_held" shows the held pieces; "drop"
 * discards them; "finish" ends the answer without a finish from a side; "fail" throws the last error.
 */
export type Action =
  | { readonly do: "open" | "admit" | "retry"; readonly side: Side }
  | { readonly do: "settle"; readonly side: Side; readonly as: SettledAs }
  | { readonly do: "finish"; readonly reason: "length" }
  | { readonly do: "hold" | "show" | "show_held" | "drop" | "fail" };

/**
 * The state of an answer. `shown`: tokens that the caller has; `held`: tokens that are held back; `seen`:
 * tokens of the present part.
 */
export interface State {
  readonly side: Side;
  readonly phase: Phase;
  readonly shown: number;
  readonly held: number;
  readonly seen: number;
  readonly plain: boolean;
  readonly finish: string | null;
  readonly path: readonly Side[];
  readonly reasons: readonly Reason[];
  readonly degraded: boolean;
  readonly device_failures: number;
  readonly cloud_failures: number;
  readonly watching: boolean;
  readonly escalated: boolean;
  readonly logprobs: boolean;
  readonly raced: boolean;
  readonly why: Why | null;
  readonly candidates: readonly Side[];
  readonly pending: HandoverEvent | null;
}

type Next = readonly [State, readonly Action[]];
type Row = (rules: Rules, state: State, event: HandoverEvent) => Next;

/** Makes the rules of one answer. A whole answer is shown only at its end, so all of it can be replaced. */
export function rulesOf(
  policy: Policy,
  decision: RouteDecision,
  answer: {
    readonly max_tokens: number;
    readonly plain: boolean;
    readonly private: boolean;
    readonly streamed: boolean;
  },
): Rules {
  const { max_tokens, plain, streamed } = answer;
  const free = policy.shadow === null && !answer.private;
  const watched = free && policy.escalation !== "off" && decision.fallback === "cloud";
  const restart = policy.escalation === "restart";
  return {
    max_tokens,
    plain,
    private: answer.private,
    watched,
    restart,
    hold: !watched ? 0 : restart && !streamed ? max_tokens + 1 : policy.hold_tokens,
    hedge: free && policy.hedge_seconds !== null ? decision.fallback : null,
    hedge_seconds: policy.hedge_seconds,
    after_cut: policy.after_cut,
    before_fallback: policy.retry.before_fallback,
  };
}

/** The state before the first event, which is "start". */
export function begin(rules: Rules, side: Side, reasons: readonly Reason[] = [], degraded = false): State {
  return {
    side,
    phase: "idle",
    shown: 0,
    held: 0,
    seen: 0,
    plain: rules.plain,
    finish: null,
    path: [],
    reasons,
    degraded,
    device_failures: 0,
    cloud_failures: 0,
    watching: false,
    escalated: false,
    logprobs: true,
    raced: false,
    why: null,
    candidates: [],
    pending: null,
  };
}

/** The sides that have a part open. */
export function running({ phase, side, why }: State): readonly Side[] {
  if (phase === "racing") return [side, other(side)];
  const waits = phase === "asking" && (why === "low" || why === "hedge");
  return phase === "answering" || phase === "finished" || waits ? [side] : [];
}

/**
 * Returns the next state and the actions. An event that the table does not have came late and changes
 * nothing.
 */
export function advance(rules: Rules, state: State, event: HandoverEvent): Next {
  const row = TABLE[state.phase][event.on];
  const alone = state.phase === "answering" || state.phase === "finished";
  if (!row || (alone && (event.side ?? state.side) !== state.side)) return [state, []];
  return row(rules, state, event);
}

const start: Row = (rules, state) => open(rules, state, state.side);

const piece: Row = (rules, before, event) => {
  const tokens = tokensOf(event);
  const state = { ...before, seen: before.seen + tokens };
  // A complete answer can still be replaced if nothing of it is shown.
  const replaceable = !event.finish || (rules.restart && state.shown === 0);
  if (state.watching && event.low && replaceable) return low(rules, state, event, event.low);
  if (state.watching && !event.finish && state.seen < rules.hold)
    return [{ ...state, held: state.held + tokens, plain: state.plain && isPlain(event) }, [{ do: "hold" }]];
  return show(state, event);
};

function show(state: State, event: HandoverEvent): Next {
  const after = shownOf(state);
  const shown = after.shown + tokensOf(event);
  const finish = event.finish ?? null;
  const plain = state.plain && isPlain(event);
  const phase = finish === null ? "answering" : "finished";
  return [{ ...after, shown, plain, finish, pending: null, phase }, [{ do: "show" }]];
}

function shownOf(state: State): State {
  const path = state.path.at(-1) === state.side ? state.path : [...state.path, state.side];
  return { ...state, shown: state.shown + state.held, held: 0, path };
}

/**
 * The monitor flagged the answer: hand over to the cloud if allowed. Held pieces are shown, unless they can
 * be replaced.
 */
function low(rules: Rules, before: State, pending: HandoverEvent, found: Reason): Next {
  const state = { ...before, watching: false, escalated: true, pending, reasons: [...before.reasons, found] };
  const kept = state.held > 0 && (state.shown > 0 || !rules.restart);
  return ask(rules, kept ? shownOf(state) : state, ["cloud"], "low", kept ? [{ do: "show_held" }] : []);
}

/**
 * A side failed: choose who continues. A failed device is not tried again, a failed cloud only as a retry.
 */
const failed: Row = (rules, before, { code }) => {
  const { side } = before;
  const actions: Action[] = [{ do: "settle", side, as: "failed" }, ...dropping(before)];
  const state = dropped(rules, before);
  if (state.shown >= rules.max_tokens)
    return [{ ...state, phase: "over", finish: "length" }, [...actions, { do: "finish", reason: "length" }]];
  const after = counted(state, side, code ?? "cut");
  return ask(rules, after, order(rules, after, code ?? "cut"), "failed", actions);
};

function order(rules: Rules, state: State, code: string): readonly Side[] {
  if (state.side === "device") return state.cloud_failures > 0 ? [] : ["cloud"];
  const device: Side[] = state.device_failures > 0 ? [] : ["device"];
  if (FINAL.includes(code)) return device;
  const again = state.shown > 0 ? rules.after_cut === "cloud" : state.cloud_failures <= rules.before_fallback;
  return again ? ["cloud", ...device] : [...device, "cloud"];
}

/**
 * A side rejected the request. The cloud may take what the device rejects if nothing is shown yet; the
 * cloud's rejection goes to the caller.
 */
const refused: Row = (rules, before, event) => {
  const actions: Action[] = [{ do: "settle", side: before.side, as: "refused" }, ...dropping(before)];
  const state = dropped(rules, before);
  if (state.side === "cloud" || state.shown > 0) return ask(rules, state, [], "refused", actions);
  if (event.unwatched && state.logprobs)
    return ask(rules, { ...state, logprobs: false }, ["device"], "unwatched", actions);
  return ask(rules, { ...state, pending: event }, ["cloud"], "refused", actions);
};

const silent: Row = (rules, state) => {
  if (rules.hedge === null || rules.hedge === state.side || state.raced || state.seen > 0) return [state, []];
  return ask(rules, { ...state, raced: true }, [rules.hedge], "hedge", []);
};

/**
 * Asks the router for the first candidate. A private answer excludes the cloud, and an answer that cannot be
 * continued has no candidates.
 */
function ask(
  rules: Rules,
  before: State,
  sides: readonly Side[],
  why: Why,
  actions: readonly Action[],
): Next {
  const may = before.shown === 0 || before.plain;
  const candidates = may ? sides.filter((side) => side === "device" || !rules.private) : [];
  const state: State = { ...before, phase: "asking", candidates, why };
  const [side] = candidates;
  if (side === undefined) return nobody(state, actions);
  return [state, [...actions, { do: why === "failed" && side === state.side ? "retry" : "admit", side }]];
}

/** No side takes over: the present side continues, if it can. */
function nobody(state: State, actions: readonly Action[] = []): Next {
  if (state.why === "hedge") return [{ ...state, phase: "answering" }, actions];
  if (state.why === "low" && state.pending) {
    // The cloud was wanted.
    const [after, more] = show({ ...state, degraded: true }, state.pending);
    return [after, [...actions, ...more]];
  }
  return [{ ...state, phase: "over" }, [...actions, { do: "fail" }]];
}

const barred: Row = (rules, state) =>
  state.candidates.length < 2 || state.why === null
    ? nobody(state)
    : ask(rules, state, state.candidates.slice(1), state.why, []);

const admitted: Row = (rules, before, _) => {
  const { side, why } = before;
  const [to = side] = before.candidates;
  if (why === "hedge") {
    const reasons = [...before.reasons, reason("hedged", to, rules.hedge_seconds)];
    return [{ ...before, phase: "racing", reasons }, [{ do: "open", side: to }]];
  }
  if (why === "low") {
    const [state, actions] = open(rules, dropped(rules, before), to);
    return [state, [{ do: "settle", side, as: "left" }, { do: "drop" }, ...actions]];
  }
  if (why === "refused") {
    const reasons = [...before.reasons, reason("refused", side, before.pending?.code ?? null)];
    return open(rules, { ...before, reasons }, to);
  }
  const degraded = before.degraded || (why === "failed" && side === "cloud" && to === "device");
  return open(rules, { ...before, degraded }, to);
};

function open(rules: Rules, state: State, side: Side): Next {
  const opened = {
    ...facing(rules, state, side),
    seen: 0,
    held: 0,
    pending: null,
    candidates: [],
    why: null,
  };
  return [opened, [{ do: "open", side }]];
}

/** Makes one side the answering one. */
function facing(rules: Rules, state: State, side: Side): State {
  const watching = side === "device" && rules.watched && !state.escalated;
  return { ...state, phase: "answering", side, watching };
}

/** The first useful piece decides the race. */
const won: Row = (rules, state, event) => {
  const winner = event.side ?? state.side;
  const [after, actions] = piece(rules, facing(rules, state, winner), event);
  return [after, [{ do: "settle", side: other(winner), as: "left" }, ...actions]];
};

/** One of the two sides left the race; the other continues alone. */
const fellOut: Row = (rules, state, event) => {
  const out = event.side ?? state.side;
  if (event.on === "refused") {
    const reasons =
      out === "cloud" ? state.reasons : [...state.reasons, reason("refused", out, event.code ?? null)];
    return [facing(rules, { ...state, reasons }, other(out)), [{ do: "settle", side: out, as: "refused" }]];
  }
  const after = facing(rules, counted(state, out, event.code ?? "cut"), other(out));
  return [after, [{ do: "settle", side: out, as: "failed" }]];
};

/** After the finish the answer is complete, however its stream ends. */
const whole: Row = (_, state) => [
  { ...state, phase: "over" },
  [{ do: "settle", side: state.side, as: "ok" }],
];

const left: Row = (_, state) => [
  { ...state, phase: "over" },
  running(state).map((side) => ({ do: "settle", side, as: "left" })),
];

function counted(state: State, side: Side, code: string): State {
  const reasons = [...state.reasons, reason(state.shown > 0 ? "cut" : "failed", side, code)];
  const name = `${side}_failures` as const;
  return { ...state, reasons, [name]: state[name] + 1 };
}

/** Discards what was held back, which no one has seen. */
function dropped(rules: Rules, state: State): State {
  return { ...state, held: 0, plain: state.shown > 0 ? state.plain : rules.plain };
}

function dropping({ held }: State): Action[] {
  return held > 0 ? [{ do: "drop" }] : [];
}

function tokensOf({ tokens = 1 }: HandoverEvent): number {
  return tokens;
}

function isPlain({ plain = true }: HandoverEvent): boolean {
  return plain;
}

function other(side: Side): Side {
  return side === "cloud" ? "device" : "cloud";
}

const TABLE: Readonly<Record<Phase, Partial<Record<EventKind, Row>>>> = {
  idle: { start, left },
  answering: { piece, ended: failed, failed, refused, silent, left },
  racing: { piece: won, ended: fellOut, failed: fellOut, refused: fellOut, left },
  asking: { admitted, barred, left },
  finished: { ended: whole, failed: whole, refused: whole, left },
  over: {},
};
