/** CPU seconds of this process and its children, as tests/support/times.py counts them for pytest. */

import { readdirSync, readFileSync } from "node:fs";

/** Linux reports CPU time to programs in hundredths of a second, whatever unit the kernel uses. */
const TICKS_PER_SECOND = 100;

/** User and system seconds of this process, of its ended children, and of its running descendants. */
export function cpuSeconds(): number {
  if (process.platform === "linux") return ticksOf("self") / TICKS_PER_SECOND;
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

/** The processor time of a process by its id, in ticks; a process that has ended counts as 0. */
function ticksOf(pid: string): number {
  const stat = read(`/proc/${pid}/stat`);
  // utime, stime, cutime, cstime: fields 14 to 17 of proc(5). The second is a name that may hold blanks.
  const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
  const own = fields.slice(11, 15).reduce((sum, ticks) => sum + Number(ticks), 0);
  const children = list(`/proc/${pid}/task`).flatMap((thread) =>
    read(`/proc/${pid}/task/${thread}/children`).split(" ").filter(Boolean),
  );
  return children.reduce((sum, child) => sum + ticksOf(child), own);
}

/** Reads a file of /proc; "" if its process has just ended. */
function read(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
}

function list(path: string): readonly string[] {
  try {
    return readdirSync(path);
  } catch {
    return [];
  }
}
