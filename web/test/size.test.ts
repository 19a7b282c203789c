import { expect, test } from "vitest";
import { ADAPTERS, LIMITS, measure } from "../scripts/size.mjs";

test("the package stays small", async () => {
  const { runtime, routing, models, all, ...adapters } = await measure();
  expect(runtime).toBeGreaterThan(5_000);
  expect(runtime).toBeLessThanOrEqual(LIMITS.runtime);
  expect(routing).toBeGreaterThan(5_000);
  expect(routing).toBeLessThanOrEqual(LIMITS.routing);
  expect(models).toBeGreaterThan(5_000);
  expect(models).toBeLessThanOrEqual(LIMITS.models);
  for (const name of ADAPTERS) {
    expect(adapters[name]).toBeGreaterThan(500);
    expect(adapters[name]).toBeLessThanOrEqual(LIMITS[name]);
  }
  expect(all).toBeLessThanOrEqual(LIMITS.all);
});
