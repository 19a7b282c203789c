import { existsSync } from "node:fs";
import puppeteer, { type Browser } from "puppeteer-core";

const PATHS = ["/usr/bin/firefox-esr", "/usr/bin/firefox"];

export const FIREFOX = process.env.FIREFOX ?? PATHS.find((path) => existsSync(path)) ?? null;

/** The system's headless Firefox, by WebDriver BiDi: Playwright drives a Firefox of its own only. */
export function openFirefox(): Promise<Browser> {
  if (!FIREFOX) throw new Error("no Firefox found; install it or set FIREFOX");
  return puppeteer.launch({ browser: "firefox", executablePath: FIREFOX, headless: true });
}
