import { readFileSync } from "node:fs";
import { describe, expect, test } from "vitest";
import { type DifficultyModel, loadDifficulty, messagesToPrompt } from "../src/routing/difficulty.js";

const ROOT = new URL("../../", import.meta.url);
const read = (path: string): unknown => JSON.parse(readFileSync(new URL(path, ROOT), "utf8"));

interface Vectors {
  readonly prompts: readonly {
    readonly name: string;
    readonly prompt: string;
    readonly times: number;
    readonly score: number;
  }[];
  readonly messages: readonly {
    readonly messages: readonly { readonly role: string; readonly content?: unknown }[];
    readonly prompt: string;
  }[];
}

/** Python's results, recorded by tests/vectors/routing/record_difficulty.py. */
const VECTORS = read("tests/vectors/routing/difficulty.json") as Vectors;
const MODEL = read("routing/difficulty/model.json") as DifficultyModel;

describe("the difficulty of a prompt", () => {
  test.each(VECTORS.prompts)("is Python's: $name", async ({ prompt, times, score }) => {
    const { score: scored } = await loadDifficulty(MODEL);
    expect(Math.abs(scored(prompt.repeat(times)) - score)).toBeLessThanOrEqual(1e-6);
  });

  test.each(VECTORS.messages)("is that of what Python reads of a conversation", ({ messages, prompt }) => {
    expect(messagesToPrompt(messages)).toBe(prompt);
  });

  test("a model of another format or with unknown features is refused by name", async () => {
    await expect(loadDifficulty({ ...MODEL, format: 2 })).rejects.toThrow(/format 2; this version reads 1/);
    const open = { ...MODEL.heads.open, features: MODEL.heads.open.features.map(() => "unheard_of") };
    await expect(loadDifficulty({ ...MODEL, heads: { ...MODEL.heads, open } })).rejects.toThrow(/unheard_of/);
  });

  test("an address that does not answer with a model is named", async () => {
    await expect(loadDifficulty("data:application/json,{}")).rejects.toThrow(/format undefined/);
  });
});
