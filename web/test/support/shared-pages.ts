import type { Page } from "playwright-core";
import type * as nearfar from "../../src/page/index.js";
import { type EnginePage, importPackage } from "./engine-page.js";

declare global {
  /** The engine that a page has opened, which it shares with others. */
  var shared: nearfar.Engine;
}

/** Actions of tests on pages that share one engine. */
export interface SharedPages {
  /** A page of the same browser profile; `alone`: as in a browser without SharedWorker. */
  readonly another: (alone?: boolean) => Promise<Page>;
  /** Opens the engine as `shared`; resolves with its model's name, or the error as a string. */
  readonly open: (page: Page, url?: string) => Promise<string>;
  /** The nine greedy tokens after the prompt. */
  readonly ask: (page: Page, prompt: string) => Promise<string>;
  /** The number of kernels that the engine has launched, which all pages of one engine agree on. */
  readonly launches: (page: Page) => Promise<number>;
  /** The number of weight files that the server was asked for. */
  readonly shards: () => number;
}

/** `script`: the address of the app's SharedWorker; without one sharedEngine() chooses where the engine is. */
export function sharedPages(at: EnginePage, script: string | null = null): SharedPages {
  return {
    another: async (alone = false) => {
      const page = await at.page.context().newPage();
      if (alone) await page.addInitScript(() => Reflect.deleteProperty(globalThis, "SharedWorker"));
      await page.goto(at.server.url.href);
      await importPackage(page, new URL("dist/index.js", at.server.url));
      return page;
    },
    open: (page, url = "/toy/") =>
      page.evaluate(
        async ([address, own]) => {
          const port = (path: string): MessagePort => new SharedWorker(path, { type: "module" }).port;
          try {
            globalThis.shared = await nearfarPackage.createEngine(address, {
              worker: () =>
                own === null ? nearfarPackage.sharedEngine() : nearfarPackage.sharedEngine(port(own)),
            });
            return globalThis.shared.model.name;
          } catch (error) {
            return String(error);
          }
        },
        [url, script] as const,
      ),
    ask: (page, prompt) =>
      page.evaluate(async (text) => {
        const request = { prompt: text, max_tokens: 9, temperature: 0 };
        const { choices } = await globalThis.shared.completions.create(request);
        return choices[0]?.text ?? "";
      }, prompt),
    launches: (page) => page.evaluate(async () => (await globalThis.shared.stats()).launches),
    shards: () => at.server.requests.filter((path) => path.includes("weights/")).length,
  };
}
