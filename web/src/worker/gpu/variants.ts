import { type DEVICE_CLASSES, NEARNESS, RULES } from "../../both/format.js";
import type { DeviceClass } from "../../both/manifest.js";

/**
 * Which of an artifact's programs a GPU runs: those made for its class. The same as in format/adapters.py and
 * edge_runtime/artifact/variants.py: both replay tests/vectors/variants.
 */

/** What an adapter says of itself; empty where it does not. */
export interface Adapter {
  readonly vendor: string;
  readonly architecture: string;
  readonly name: string;
  readonly driver: string;
  /** What a driver calls its device, or "mobile" for that of a phone or tablet; "other" where nobody says. */
  readonly kind: string;
}

/** What of a program counts here. */
export interface Candidate {
  readonly name: string;
  readonly deviceClass: DeviceClass | null;
}

interface Rule {
  readonly deviceClass: (typeof DEVICE_CLASSES)[number];
  readonly kinds: readonly string[];
  readonly vendors: readonly string[];
  readonly words: readonly string[];
}

const FINALISTS = 3;

/** The class of an adapter: that of the first rule that it meets. */
export function classOf(adapter: Adapter): DeviceClass {
  const { vendor, architecture, name, driver, kind } = adapter;
  const said = [vendor, architecture, name, driver].join(" ").toLowerCase();
  const rules: readonly Rule[] = RULES;
  const met = rules.find(
    ({ kinds, vendors, words }) =>
      (kinds.length === 0 || kinds.includes(kind)) &&
      (vendors.length === 0 || vendors.includes(vendor.toLowerCase())) &&
      (words.length === 0 || words.some((word) => said.includes(word))),
  );
  return met?.deviceClass ?? "integrated";
}

/**
 * The finalists among the programs that a device can run, the one to take without a trial in front: those of
 * its own class, then of the next class that has any; never one that lost the device before, as long as there
 * is another.
 */
export function lineUp<C extends Candidate>(
  programs: readonly C[],
  deviceClass: DeviceClass,
  lost: readonly string[] = [],
): readonly C[] {
  const well = programs.filter(({ name }) => !lost.includes(name));
  const near: readonly DeviceClass[] = NEARNESS[deviceClass];
  const place = (program: C): number => near.indexOf(program.deviceClass ?? "software");
  const left = (well.length > 0 ? well : [...programs]).sort((a, b) => place(a) - place(b));
  const classes = [...new Set(left.map((program) => program.deviceClass))].slice(0, 2);
  const most = deviceClass === "software" ? 1 : FINALISTS;
  return left.filter((program) => classes.includes(program.deviceClass)).slice(0, most);
}
