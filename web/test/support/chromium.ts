import { existsSync } from "node:fs";
import { type Browser, type BrowserContext, chromium } from "playwright-core";

const PATHS = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

export const CHROMIUM = process.env.CHROMIUM ?? PATHS.find((path) => existsSync(path)) ?? null;

const ARGUMENTS = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox"];

function executable(): string {
  if (!CHROMIUM) throw new Error("no Chromium found; install it or set CHROMIUM");
  return CHROMIUM;
}

/** Headless Chromium with WebGPU on the processor (SwiftShader), where there is no GPU. */
export function openChromium(...more: string[]): Promise<Browser> {
  return chromium.launch({ executablePath: executable(), args: [...ARGUMENTS, ...more] });
}

/** Opens Chromium with an extension, which needs a profile: a folder. */
export function openChromiumWith(profile: string, extension: string): Promise<BrowserContext> {
  const args = [...ARGUMENTS, `--disable-extensions-except=${extension}`, `--load-extension=${extension}`];
  return chromium.launchPersistentContext(profile, { executablePath: executable(), args });
}
