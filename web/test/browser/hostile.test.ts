/** Aborted loads, disposed reloads, and engines beside each other, at every moment. */

import type { Page } from "playwright-core";
import { describe, expect, test } from "vitest";
import type * as nearfar from "../../src/page/index.js";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage, importPackage } from "../support/engine-page.js";
import { expectedText } from "../support/toy-artifact.js";

declare global {
  var options: () => nearfar.EngineOptions;
  var text: (engine: nearfar.Engine, prompt: string) => Promise<string>;
}

/** Milliseconds after which a load is aborted: loading the toy takes some hundred. */
const MOMENTS = [0, 1, 3, 7, 15, 30, 50, 75, 100, 130, 170, 220, 280, 350, 450];

describe.skipIf(!CHROMIUM)("at any moment", { timeout: 180_000 }, () => {
  const at = enginePage();

  const prepared = async (page: Page, shared: boolean): Promise<Page> => {
    await page.evaluate((isShared) => {
      globalThis.options = () => (isShared ? { worker: () => nearfarPackage.sharedEngine() } : {});
      globalThis.text = async (engine, prompt) => {
        const request = { prompt, max_tokens: 9, temperature: 0 };
        return (await engine.completions.create(request)).choices[0]?.text ?? "";
      };
    }, shared);
    return page;
  };

  /** A page; `shared`: it uses the engine of all pages, without a SharedWorker. */
  const another = async (shared: boolean): Promise<Page> => {
    const page = await at.page.context().newPage();
    if (shared) await page.addInitScript(() => Reflect.deleteProperty(globalThis, "SharedWorker"));
    await page.goto(at.server.url.href);
    await importPackage(page, new URL("dist/index.js", at.server.url));
    return prepared(page, shared);
  };

  const answers = (page: Page, prompt: string): Promise<string> =>
    page.evaluate(async (asked) => {
      const engine = await nearfarPackage.createEngine("/toy/", options());
      const said = await text(engine, asked);
      await engine.dispose();
      return said;
    }, prompt);

  /** The number of workers left when no more of them end. */
  const workers = async (page: Page): Promise<number> => {
    for (let worker = page.workers()[0]; worker; worker = page.workers()[0]) {
      const ended = await worker.waitForEvent("close", { timeout: 30_000 }).catch(() => null);
      if (!ended) break;
    }
    return page.workers().length;
  };

  describe.each([{ shared: false }, { shared: true }])("shared: $shared", ({ shared }) => {
    test("a load is aborted: it rejects with the reason, and nothing stays", async () => {
      const page = await another(shared);
      const errors: unknown[] = [];
      page.on("pageerror", (error) => errors.push(error));
      for (const moment of MOMENTS) {
        const told = await page.evaluate(async (after) => {
          const left = new AbortController();
          setTimeout(() => left.abort("changed my mind"), after);
          try {
            const engine = await nearfarPackage.createEngine("/toy/", { ...options(), signal: left.signal });
            await engine.dispose();
            return "loaded";
          } catch (reason) {
            return String(reason);
          }
        }, moment);
        expect([moment, told]).toEqual([moment, expect.stringMatching(/^(changed my mind|loaded)$/)]);
      }
      expect(await workers(page)).toBe(0);
      expect(await answers(page, "q")).toBe(expectedText("q", 9));
      expect(await workers(page)).toBe(0);
      expect(errors).toEqual([]);
    });

    test("a reload is disposed of: it rejects, and nothing stays", async () => {
      const page = await another(shared);
      for (const moment of MOMENTS) {
        const told = await page.evaluate(async (after) => {
          const engine = await nearfarPackage.createEngine("/toy/", options());
          const reloaded = engine.reload().then(
            () => "reloaded",
            ({ code }) => code,
          );
          await new Promise((resolve) => setTimeout(resolve, after));
          await engine.dispose();
          return [await reloaded, await text(engine, "q").catch(({ code }) => code)];
        }, moment);
        expect([moment, ...told]).toEqual([
          moment,
          expect.stringMatching(/^(reloaded|disposed)$/),
          "disposed",
        ]);
      }
      expect(await workers(page)).toBe(0);
      expect(await answers(page, "z")).toBe(expectedText("z", 9));
    });

    test("two engines of a page: one is disposed of while the other answers", async () => {
      const page = await another(shared);
      const texts = await page.evaluate(async () => {
        const [first, second] = await Promise.all([
          nearfarPackage.createEngine("/toy/", options()),
          nearfarPackage.createEngine("/toy/", options()),
        ]);
        const both = [text(first, "q"), text(second, "z")];
        const said = await Promise.all(both);
        const going = text(second, "b");
        await first.dispose();
        const last = await going;
        await second.dispose();
        return [...said, last];
      });
      expect(texts).toEqual(["q", "z", "b"].map((prompt) => expectedText(prompt, 9)));
      expect(await workers(page)).toBe(0);
    });
  });

  test("who leads aborts, others that wait are loaded for", async () => {
    const first = await another(true);
    const second = await another(true);
    for (const moment of MOMENTS.filter((_, index) => index % 2 === 0)) {
      const aborted = first.evaluate(async (after) => {
        const left = new AbortController();
        setTimeout(() => left.abort("changed my mind"), after);
        await nearfarPackage
          .createEngine("/toy/", { ...options(), signal: left.signal })
          .then((engine) => engine.dispose())
          .catch(() => undefined);
      }, moment);
      expect([moment, await answers(second, "c")]).toEqual([moment, expectedText("c", 9)]);
      await aborted;
    }
  });
});
