import { readdirSync, readFileSync } from "node:fs";
import { afterEach, describe, expect, test } from "vitest";
import {
  type Action,
  advance,
  begin,
  type EventKind,
  type HandoverEvent,
  type Rules,
  type State,
} from "../src/routing/handover.js";
import { type Chunk, HybridClient } from "../src/routing/index.js";
import { reason, type Side } from "../src/routing/types.js";
import { ScriptedCloud, ScriptedDevice } from "./support/scripted.js";

/**
 * The scripts that Python replays too; tests/vectors/routing/handover_scripts.py says what their lines mean.
 */
const VECTORS = new URL("../../tests/vectors/routing/handover/", import.meta.url);

interface Script {
  readonly name: string;
  readonly begin: Side;
  readonly rules: Rules;
  readonly steps: readonly (readonly [event: string, actions: readonly string[]])[];
  readonly outcome: {
    readonly phase: string;
    readonly shown: number;
    readonly finish: string | null;
    readonly path: readonly Side[];
    readonly degraded: boolean;
    readonly reasons: readonly (readonly [string, Side, unknown])[];
  };
}

const FILES = readdirSync(VECTORS).map((file) => file.replace(".json", ""));
const SCRIPTS = FILES.flatMap((file) =>
  (JSON.parse(readFileSync(new URL(`${file}.json`, VECTORS), "utf8")) as Script[]).map((script) => ({
    file,
    script,
  })),
);

function eventOf(line: string): HandoverEvent {
  const [kind = "", side, ...words] = line.split(" ");
  const on = kind as EventKind;
  if (on === "piece") {
    const finish = words.find((word) => word.startsWith("="))?.slice(1) ?? null;
    const low = words.includes("low") ? reason("low_logprob", "device", -3, -2) : null;
    return { on, side: side as Side, tokens: Number(words[0]), plain: !words.includes("calls"), finish, low };
  }
  const code = words.find((word) => word !== "unwatched") ?? null;
  return { on, side: (side as Side) ?? null, code, unwatched: words.includes("unwatched") };
}

function lineOf(action: Action): string {
  return Object.values(action).join(" ");
}

function outcomeOf({ phase, shown, finish, path, degraded, reasons }: State): Script["outcome"] {
  const told = reasons.map(({ code, side, value }) => [code, side as Side, value] as const);
  return { phase, shown, finish, path, degraded, reasons: told };
}

test.each(SCRIPTS.map(({ file, script }) => [`${file}: ${script.name}`, script] as const))(
  "%s",
  (_, script) => {
    let state = begin(script.rules, script.begin);
    for (const [line, expected] of script.steps) {
      const [next, actions] = advance(script.rules, state, eventOf(line));
      state = next;
      expect(actions.map(lineOf), line).toEqual(expected);
    }
    expect(outcomeOf(state)).toEqual(script.outcome);
  },
);

/** Words of events that scripted sides cannot produce, or only by chance. */
const UNPLAYED = ["silent", "barred", "low", "left", "unwatched", "connection"];

function partsOf({ steps }: Script): Record<Side, string[][]> {
  const parts: Record<Side, string[][]> = { device: [], cloud: [] };
  for (const [line, actions] of steps) {
    if (line !== "start" && line !== "admitted") parts[line.split(" ")[1] as Side].at(-1)?.push(line);
    for (const action of actions)
      if (action.startsWith("open ")) parts[action.split(" ")[1] as Side].push([]);
  }
  return parts;
}

function isPlayable(script: Script): boolean {
  const { steps, rules } = script;
  if (steps.some(([line]) => line.split(" ").some((word) => UNPLAYED.includes(word)))) return false;
  if (steps.some(([line, actions]) => actions.length === 0 && !/^(ended|failed)/.test(line))) return false;
  const inMidAnswer = Object.values(partsOf(script))
    .flat()
    .some((part) => part.slice(1).some((line) => line.startsWith("refused cloud")));
  return !rules.private && !rules.watched && !inMidAnswer;
}

describe("through the client", () => {
  const clouds: ScriptedCloud[] = [];
  afterEach(async () => {
    for (const cloud of clouds.splice(0)) await cloud.stop();
  });
  const played = SCRIPTS.filter(({ script }) => isPlayable(script));

  test("there are enough of them", () => expect(played.length).toBeGreaterThanOrEqual(18));

  test.each(played.map(({ file, script }) => [`${file}: ${script.name}`, script] as const))(
    "%s",
    async (_, script) => {
      const { rules, outcome } = script;
      const parts = partsOf(script);
      // A busy machine is silent for a while, too: only scripts with a timeout wait for one.
      const isSilent = script.steps.some(([line]) => /\b(timeout|stalled)\b/.test(line));
      const silence = isSilent ? 0.3 : 20;
      const device = new ScriptedDevice(parts.device);
      const cloud = await new ScriptedCloud(parts.cloud).start();
      clouds.push(cloud);
      const client = new HybridClient({
        device,
        device_features: ["logprobs", "json_object"],
        cloud: { baseURL: cloud.url, model: "m" },
        hints: { read: () => ({ online: true, battery: null, charging: null, metered: null }) },
        policy: {
          mode: `prefer_${script.begin}`,
          after_cut: rules.after_cut,
          escalation: "off",
          budget_day: 1000,
          retry: { base: 0.001, before_fallback: rules.before_fallback },
          timeouts: {
            first_token: silence,
            between: silence,
            device_first_token: silence,
            device_between: silence,
          },
        },
      });
      const logprobs = script.steps.some(([line]) => line.includes("logprobs"));
      const chunks: Chunk[] = [];
      let failure: unknown = null;
      try {
        for await (const chunk of await client.chat.completions.create({
          messages: [{ role: "user", content: "Go" }],
          stream: true,
          max_tokens: rules.max_tokens,
          seed: 1,
          temperature: 0,
          extra_body: { min_tokens: 1 },
          ...(logprobs && { logprobs }),
          ...(!rules.plain && { response_format: { type: "json_object" } }),
        }))
          chunks.push(chunk);
      } catch (error) {
        failure = error;
      }
      const deltas = chunks.flatMap(({ choices }) => choices.map(({ delta }) => delta));
      const text = deltas
        .map(({ content, tool_calls }) => (content ?? "") + "x ".repeat(tool_calls?.length ?? 0))
        .join("");
      expect(failure !== null).toBe(script.steps.some(([, actions]) => actions.includes("fail")));
      expect(text).toBe("x ".repeat(outcome.shown));
      expect(device.left + cloud.left).toBe(0);
      const record = client.records[0];
      expect(record?.outcome.reasons.slice(1).map(({ code, side, value }) => [code, side, value])).toEqual(
        outcome.reasons,
      );
      if (failure !== null) return;
      expect(chunks.at(-1)?.choices[0]?.finish_reason).toBe(outcome.finish);
      expect(chunks.at(-1)?.x_nearfar).toMatchObject({ path: outcome.path, degraded: outcome.degraded });
    },
  );
});
