import { expect, test } from "vitest";
import { LIMITS, measure } from "../scripts/size.mjs";

test("the package stays small", async () => {
  const { runtime, all } = await measure();
  expect(runtime).toBeGreaterThan(5_000);
  expect(runtime).toBeLessThanOrEqual(LIMITS.runtime);
  expect(all).toBeLessThanOrEqual(LIMITS.all);
});
