import { expect, test } from "vitest";
import { LIMITS, measure } from "../scripts/size.mjs";

test("the package stays small", async () => {
  const { runtime, routing, all } = await measure();
  expect(runtime).toBeGreaterThan(5_000);
  expect(runtime).toBeLessThanOrEqual(LIMITS.runtime);
  expect(routing).toBeGreaterThan(5_000);
  expect(routing).toBeLessThanOrEqual(LIMITS.routing);
  expect(all).toBeLessThanOrEqual(LIMITS.all);
});
