import { existsSync } from "node:fs";
import puppeteer, { type Browser } from "puppeteer-core";

const PATHS = ["/usr/bin/firefox-esr", "/usr/bin/firefox"];

export const FIREFOX = process.env.FIREFOX ?? PATHS.find((path) => existsSync(path)) ?? null;

/** The system's headless Firefox, by WebDriver BiDi: Playwright drives a Firefox of its own only. */
export function openFirefox(preferences: Readonly<Record<string, boolean>> = {}): Promise<Browser> {
  if (!FIREFOX) throw new Error("no Firefox found; install it or set FIREFOX");
  return puppeteer.launch({
    ...{ browser: "firefox", executablePath: FIREFOX, headless: true },
    extraPrefsFirefox: preferences,
  });
}

/** Firefox with WebGPU, on a software GPU (Mesa's lavapipe) where there is no other. */
export function openFirefoxWithGpu(): Promise<Browser> {
  return openFirefox({
    "dom.webgpu.enabled": true,
    "dom.webgpu.workers.enabled": true,
    "gfx.webgpu.ignore-blocklist": true,
    "gfx.webgpu.force-enabled": true,
  });
}
