/** The badge of an answer: where it came from, and on hover or focus why. */

import { describeReason, type RouteInfo } from "../src/routing/index.js";
import { formatCount } from "./format.js";

const NAMES = { device: "Device", cloud: "Cloud" } as const;

let count = 0;

export function badge(): { readonly node: HTMLElement; show(info: RouteInfo): void } {
  const node = document.createElement("span");
  node.className = "badge";
  const label = document.createElement("button");
  const tip = document.createElement("span");
  label.type = "button";
  tip.id = `why-${++count}`;
  tip.className = "tip";
  tip.setAttribute("role", "tooltip");
  label.setAttribute("aria-describedby", tip.id);
  node.append(label, tip);
  return {
    node,
    show: (info) => {
      const path = info.path.length > 0 ? info.path : [info.route];
      node.dataset.route = info.route;
      node.dataset.path = path.join(" ");
      node.toggleAttribute("data-degraded", info.degraded);
      label.textContent = path.map((side) => NAMES[side]).join(" → ") + (info.degraded ? " · degraded" : "");
      tip.replaceChildren(...linesOf(info).map(line));
    },
  };
}

function linesOf(info: RouteInfo): string[] {
  const lines = info.reasons.map(describeReason);
  if (info.degraded) lines.unshift("The cloud was wanted, the device answered.");
  if (info.saved > 0) lines.push(`${formatCount(info.saved)} cloud tokens saved`);
  if (info.spent > 0) lines.push(`${formatCount(info.spent)} cloud tokens used`);
  return lines.length > 0 ? lines : ["No other side was possible."];
}

function line(text: string): HTMLElement {
  const node = document.createElement("span");
  node.textContent = text;
  return node;
}
