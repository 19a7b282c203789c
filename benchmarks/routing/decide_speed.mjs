// @ts-check
/** The Node half of decide_speed.py: microseconds a call of the TypeScript scorer and decision. Reads a job from stdin. */
import { readFileSync } from "node:fs";
import { performance } from "node:perf_hooks";

const job = JSON.parse(readFileSync(0, "utf8"));
const routing = await import(job.bundle);
const difficulty = await routing.loadDifficulty(JSON.parse(readFileSync(job.model, "utf8")));

/** @param {() => unknown} call */
function measure(call) {
  for (let at = 0; at < job.warm; at++) call();
  const times = [];
  for (let at = 0; at < job.calls; at++) {
    const start = performance.now();
    call();
    times.push((performance.now() - start) * 1000);
  }
  return times;
}

/** @type {Record<string, number[]>} */
const found = {};
for (const [name, text] of Object.entries(job.prompts)) found[`score, ${name}`] = measure(() => difficulty.score(text));
const { request, device, cloud } = job.case;
const policy = routing.parsePolicy(job.case.policy);
found.decide = measure(() => routing.decide(request, device, cloud, policy));
process.stdout.write(JSON.stringify(found));
