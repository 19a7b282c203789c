/** Formats numbers for people. */

const UNITS = ["B", "KB", "MB", "GB", "TB"] as const;

/** 1,234,567 → "1.2 MB": decimal units, as browsers and file managers show downloads. */
export function formatBytes(bytes: number): string {
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${value.toFixed(unit > 0 && value < 99.95 ? 1 : 0)} ${UNITS[unit]}`;
}

export function formatCount(count: number): string {
  return count.toLocaleString("en");
}

/** Formats tokens per second with meaningful digits. */
export function formatRate(rate: number): string {
  return `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`;
}

export function formatSeconds(milliseconds: number): string {
  const seconds = milliseconds / 1000;
  return seconds < 1 ? `${Math.round(milliseconds)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** Formats the milliseconds of a step, with enough digits to tell two programs apart. */
export function formatMilliseconds(milliseconds: number): string {
  return `${milliseconds.toFixed(milliseconds < 10 ? 2 : 1)} ms`;
}
