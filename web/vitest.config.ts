import { defineConfig } from "vitest/config";
import { FILE, Times } from "./test/support/times.js";

const times = process.env[FILE];

export default defineConfig({
  test: {
    pool: "forks",
    testTimeout: 30_000,
    globalSetup: ["test/support/builder.ts"],
    ...(times && { reporters: ["default", new Times(times)], setupFiles: ["test/support/times-hooks.ts"] }),
  },
});
