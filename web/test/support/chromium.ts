import { existsSync } from "node:fs";
import { type Browser, chromium } from "playwright-core";

const PATHS = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

export const CHROMIUM = process.env.CHROMIUM ?? PATHS.find((path) => existsSync(path)) ?? null;

/** Headless Chromium with WebGPU on the processor (SwiftShader), where there is no GPU. */
export function openChromium(): Promise<Browser> {
  if (!CHROMIUM) throw new Error("no Chromium found; install it or set CHROMIUM");
  const args = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox"];
  return chromium.launch({ executablePath: CHROMIUM, args });
}
