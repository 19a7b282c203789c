/**
 * Compiles shaders as Chrome does, with all features of WebGPU enabled and no more than its guaranteed limits.
 * Dawn's null device runs nothing, but reads and checks everything, float16 and subgroups included.
 *
 *     node compile.mjs < sources.json        {"name": ["code", "entry point"], ...}
 *
 * Prints Dawn's error messages: {"name": ["...", ...], ...}.
 */
import { readFileSync } from "node:fs";
import { create, globals } from "webgpu";

// Kept for ever, because a device is destroyed with the object that made it.
Object.assign(globalThis, globals, { gpu: create(["backend=null"]) });
const adapter = await globalThis.gpu.requestAdapter();
const device = await adapter.requestDevice({ requiredFeatures: ["shader-f16", "subgroups"] });
const complaints = {};
for (const [name, [code, entryPoint]] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ code });
  const found = (await module.getCompilationInfo()).messages.map(
    ({ lineNum, message }) => `${lineNum}: ${message}`,
  );
  const pipeline = device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint } });
  await pipeline.catch((error) => found.push(String(error)));
  await device.popErrorScope();
  if (found.length > 0) complaints[name] = found;
}
process.stdout.write(JSON.stringify(complaints), () => process.exit(0));
