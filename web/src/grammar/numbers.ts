/** Writes numbers between bounds as EBNF expressions over the digits that JSON writes. */

/** The most digits after the point. */
const MOST_DIGITS = 16;
const FRACTION = `("." [0-9]{1,${MOST_DIGITS}})?`;

/** A bound: its digits before and after the point, and whether the bound itself is allowed. */
interface Bound {
  readonly whole: string;
  readonly part: string;
  readonly included: boolean;
}

export interface Bounds {
  readonly low: { readonly value: number; readonly included: boolean } | null;
  readonly high: { readonly value: number; readonly included: boolean } | null;
}

/**
 * The numbers between two bounds: integers (`whole`), or decimals without an exponent; null if there are
 * none.
 */
export function between({ low, high }: Bounds, whole: boolean): string | null {
  const positive =
    high !== null && (high.value < 0 || (high.value === 0 && !high.included))
      ? null
      : magnitudes(low && low.value >= 0 ? boundOf(low) : ZERO, high && boundOf(high), whole);
  const negative =
    low !== null && low.value >= 0
      ? null
      : magnitudes(high && high.value <= 0 ? boundOf(high) : MORE_THAN_ZERO, low && boundOf(low), whole);
  const parts = [positive, negative && `"-" (${negative})`].filter((part) => part !== null);
  return parts.length > 0 ? parts.join(" | ") : null;
}

const ZERO: Bound = { whole: "0", part: "", included: true };
const MORE_THAN_ZERO: Bound = { ...ZERO, included: false };

/** The bound's number without its sign. */
function boundOf({ value, included }: { readonly value: number; readonly included: boolean }): Bound {
  const [mantissa = "0", exponent = "0"] = Math.abs(value).toString().split("e");
  const [before = "0", after = ""] = mantissa.split(".");
  const shift = Number(exponent);
  const digits = before + after;
  const point = before.length + shift;
  const whole = point > 0 ? digits.padEnd(point, "0").slice(0, point) : "0";
  const part = point > 0 ? digits.slice(point) : digits.padStart(digits.length - point, "0");
  return { whole: whole.replace(/^0+(?=\d)/, ""), part: part.replace(/0+$/, ""), included };
}

/** Non-negative numbers from `low` up to `high`, or without an upper bound; null if there are none. */
function magnitudes(low: Bound, high: Bound | null, whole: boolean): string | null {
  const from = BigInt(low.whole);
  const to = high && BigInt(high.whole);
  if (to !== null && to < from) return null;
  const made: string[] = [];
  const first = whole ? from + (low.part === "" && low.included ? 0n : 1n) : from + 1n;
  const last = high && to !== null ? (whole && (high.part !== "" || high.included) ? to : to - 1n) : null;
  const inner = last === null || first <= last ? wholes(first, last) : null;
  if (inner) made.push(whole ? inner : `(${inner}) ${FRACTION}`);
  if (!whole) {
    const same = to === from;
    const atLow = fractions(low, same ? high : null);
    if (atLow !== null) made.push(`"${from}" ${atLow}`);
    const atHigh = high && !same ? fractions({ ...ZERO }, high) : null;
    if (atHigh !== null) made.push(`"${to}" ${atHigh}`);
  }
  return made.length > 0 ? made.join(" | ") : null;
}

/** Non-negative integers from `low` up to `high`, or without an upper bound. */
function wholes(low: bigint, high: bigint | null): string {
  const [from, to] = [low.toString(), high?.toString() ?? null];
  const made: string[] = [];
  const longest = to?.length ?? from.length;
  for (let length = from.length; length <= longest; length++) {
    const least = length === from.length ? from : `1${"0".repeat(length - 1)}`;
    const most = to !== null && length === to.length ? to : "9".repeat(length);
    made.push(alike(least, most));
  }
  if (to === null) made.push(`[1-9] [0-9]{${from.length},}`);
  return made.join(" | ");
}

/** Numbers from `low` to `high`, which have the same number of digits. */
function alike(low: string, high: string): string {
  if (low === "") return '""';
  if (/^0*$/.test(low) && /^9*$/.test(high)) return `[0-9]{${low.length}}`;
  const [first, last] = [Number(low[0]), Number(high[0])];
  const rest = low.length - 1;
  const [nines, zeros] = ["9".repeat(rest), "0".repeat(rest)];
  if (first === last) return `"${first}" (${alike(low.slice(1), high.slice(1))})`;
  const made = [`"${first}" (${alike(low.slice(1), nines)})`];
  if (first + 1 < last) made.push(`[${first + 1}-${last - 1}] [0-9]{${rest}}`);
  made.push(`"${last}" (${alike(zeros, high.slice(1))})`);
  return made.join(" | ");
}

/** The fractional part of a number whose integer part equals a bound's: a point and digits, or nothing. */
function fractions(low: Bound, high: Bound | null): string | null {
  const bounds: Fraction = {
    low: low.part,
    above: !low.included,
    high: high?.part ?? null,
    below: !(high?.included ?? true),
  };
  const digits = following(bounds, 0);
  const none = mayEnd(bounds);
  if (digits === null) return none ? '""' : null;
  return none ? `("." (${digits}))?` : `"." (${digits})`;
}

/**
 * The remaining digits of the bounds whose beginning the number equals; null for a bound that can no longer
 * be violated.
 */
interface Fraction {
  readonly low: string | null;
  readonly above: boolean;
  readonly high: string | null;
  readonly below: boolean;
}

function mayEnd({ low, above, high, below }: Fraction): boolean {
  return (low === null || (low === "" && !above)) && (high === null || high !== "" || !below);
}

/** One or more digits that keep within the bounds; null if no digit can follow. */
function following(bounds: Fraction, count: number): string | null {
  const left = MOST_DIGITS - count;
  const { low, high } = bounds;
  if (low === null && high === null) return left > 0 ? `[0-9]{1,${left}}` : null;
  // The number equals the lower bound so far, so any further digits make it larger.
  if (low === "" && !bounds.above) return following({ ...bounds, low: null }, count);
  if (left <= 0) return null;
  const made: string[] = [];
  const least = low === null ? 0 : Number(low[0] ?? 0);
  const most = high === null ? 9 : Number(high[0] ?? 0);
  for (let digit = least; digit <= most; digit++) {
    const after: Fraction = {
      ...bounds,
      low: low !== null && digit === least ? low.slice(1) : null,
      high: high !== null && digit === most ? high.slice(1) : null,
    };
    const rest = following(after, count + 1);
    const ends = mayEnd(after);
    if (rest !== null) made.push(`"${digit}" (${rest})${ends ? "?" : ""}`);
    else if (ends) made.push(`"${digit}"`);
  }
  return made.length > 0 ? made.join(" | ") : null;
}
