import { execFile } from "node:child_process";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

export const WEB = fileURLToPath(new URL("../..", import.meta.url));

/** Runs a program in a process of its own; rejects with its output if it fails. */
export async function run(
  command: string,
  args: readonly string[],
  cwd: string,
  more: Readonly<Record<string, string>> = {},
): Promise<string> {
  const env = { ...process.env, NEXT_TELEMETRY_DISABLED: "1", NO_COLOR: "1", ...more };
  const done = promisify(execFile)(command, [...args], { cwd, env, maxBuffer: 1 << 26 });
  const { stdout } = await done.catch((error: Error & { stdout: string; stderr: string }) => {
    throw new Error(`${error.message}\n${error.stdout}\n${error.stderr}`);
  });
  return stdout;
}
