import type { Page } from "playwright-core";
import { describe, expect, test } from "vitest";
import { CHROMIUM } from "../support/chromium.js";
import { enginePage } from "../support/engine-page.js";
import { sharedPages } from "../support/shared-pages.js";
import { expectedText } from "../support/toy-artifact.js";

declare global {
  var answers: Promise<unknown[]>;
}

describe.skipIf(!CHROMIUM)("sharedEngine() chooses where the engine is", { timeout: 120_000 }, () => {
  const at = enginePage();

  const { another, open, ask, launches, shards } = sharedPages(at);

  describe.each([
    { place: "in a SharedWorker", alone: false },
    { place: "in one of the pages, where there is none", alone: true },
  ])("$place", ({ alone }) => {
    test("it is loaded once, answers all pages, and refuses another model", async () => {
      const [first, second] = [await another(alone), await another(alone)];
      expect(await Promise.all([open(first), open(second)])).toEqual(["toy", "toy"]);
      expect(shards()).toBe(3);
      const asked = [ask(first, "q"), ask(second, "z"), ask(first, "b"), ask(second, "c")];
      const texts = ["q", "z", "b", "c"].map((prompt) => expectedText(prompt, 9));
      expect(await Promise.all(asked)).toEqual(texts);
      expect(await launches(second)).toBe(await launches(first));
      expect(await open(await another(alone), "/other/")).toMatch(
        /RequestError.*is shared, and has .*\/toy\//,
      );
    });

    test("a page that is done with it leaves it to the others, and may come back", async () => {
      const [first, second] = [await another(alone), await another(alone)];
      await open(first);
      await open(second);
      await first.evaluate(() => globalThis.shared.dispose());
      expect(await ask(second, "b")).toBe(expectedText("b", 9));
      expect(await open(first)).toBe("toy");
      expect(await ask(first, "c")).toBe(expectedText("c", 9));
      expect(shards()).toBe(3);
      await Promise.all([first, second].map((page) => page.evaluate(() => globalThis.shared.dispose())));
      // No tab has the engine: the next one that asks starts it again.
      expect(await open(second)).toBe("toy");
      expect(await ask(second, "q")).toBe(expectedText("q", 9));
    });

    test("a page that had the engine is closed: the others go on", async () => {
      const first = await another(alone);
      await open(first);
      const [second, third] = [await another(alone), await another(alone)];
      await Promise.all([open(second), open(third)]);
      await first.close();
      expect(await Promise.all([ask(second, "z"), ask(third, "b")])).toEqual([
        expectedText("z", 9),
        expectedText("b", 9),
      ]);
      await second.close();
      expect(await ask(third, "c")).toBe(expectedText("c", 9));
      expect(shards()).toBe(3);
    });
  });

  test("answers that had begun end by a code, others go on where the engine is next", async () => {
    const first = await another(true);
    await open(first);
    const second = await another(true);
    await open(second);
    await second.evaluate(async () => {
      let begun = (): void => undefined;
      const isBegun = new Promise<void>((resolve) => {
        begun = resolve;
      });
      const one = async (prompt: string): Promise<unknown> => {
        let text = "";
        try {
          const request = { prompt, max_tokens: 200, temperature: 0, stream: true as const };
          for await (const { choices } of await globalThis.shared.completions.create(request)) {
            text += choices[0]?.text ?? "";
            if (text !== "") begun();
          }
          return text;
        } catch (error) {
          return (error as { code: string }).code;
        }
      };
      globalThis.answers = Promise.all(["q", "z", "b", "c", "d", "e"].map(one));
      await isBegun;
    });
    await first.close();
    const answers = await second.evaluate(() => globalThis.answers);
    expect(answers).toContain("device-lost");
    for (const [index, prompt] of ["q", "z", "b", "c", "d", "e"].entries())
      expect([expectedText(prompt, 200), "device-lost"]).toContain(answers[index]);
    expect(await ask(second, "q")).toBe(expectedText("q", 9));
    expect(shards()).toBe(3);
  });

  test("the worker of the page that has the engine fails: all hear it, and can load again", async () => {
    const first = await another(true);
    await open(first);
    const second = await another(true);
    await open(second);
    const lost = Promise.all(
      [first, second].map((page) => page.evaluate(async () => (await globalThis.shared.lost).code)),
    );
    await first.workers()[0]?.evaluate(() => {
      setTimeout(() => {
        throw new Error("out of order");
      });
    });
    expect(await lost).toEqual(["worker-failed", "worker-failed"]);
    await Promise.all([first, second].map((page) => page.evaluate(() => globalThis.shared.reload())));
    expect(await Promise.all([ask(first, "q"), ask(second, "z")])).toEqual([
      expectedText("q", 9),
      expectedText("z", 9),
    ]);
    expect(shards()).toBe(3);
  });

  /**
   * Blocks the thread of a page until it is released, as browsers freeze background pages: the page does nothing,
   * and keeps its locks. Chromium's own command for freezing has no effect without a window.
   */
  const freeze = async (page: Page): Promise<() => Promise<void>> => {
    let letGo = (): void => undefined;
    const held = new Promise<void>((resolve) => {
      at.server.intercept = (path, response) => {
        if (path !== "held") return false;
        letGo = () => response.end();
        resolve();
        return true;
      };
    });
    const thawed = page.evaluate(() => {
      const request = new XMLHttpRequest();
      request.open("GET", "/held", false);
      request.send();
    });
    await held;
    return () => {
      letGo();
      return thawed;
    };
  };

  test("a page that is frozen is followed no longer, and follows when it is back", async () => {
    const first = await another(true);
    await open(first);
    const [second, third] = [await another(true), await another(true)];
    await Promise.all([open(second), open(third)]);
    const thaw = await freeze(first);
    const texts = ["z", "b"].map((prompt) => expectedText(prompt, 9));
    expect(await Promise.all([ask(second, "z"), ask(third, "b")])).toEqual(texts);
    const workers = [second, third].map((page) => page.workers().length);
    expect(workers.sort()).toEqual([0, 1]);
    const fourth = await another(true);
    expect(await open(fourth)).toBe("toy");
    await thaw();
    expect(await ask(first, "c")).toBe(expectedText("c", 9));
    expect(await launches(first)).toBe(await launches(second));
    // The page's engine ends in the background, once the page has heard that another leads.
    await expect.poll(() => first.workers().length, { timeout: 30_000 }).toBe(0);
    expect(shards()).toBe(3);
  });

  test("a page whose thread or engine is busy keeps it", async () => {
    const first = await another(true);
    await open(first);
    const second = await another(true);
    await open(second);
    const thaw = await freeze(first);
    const answer = ask(second, "z");
    await new Promise((resolve) => setTimeout(resolve, 3000));
    await thaw();
    expect(await answer).toBe(expectedText("z", 9));
    // The worker is silent for longer than a page may be.
    const busy = first.workers()[0]?.evaluate(() => {
      const end = performance.now() + 11_000;
      while (performance.now() < end);
    });
    expect(await ask(second, "b")).toBe(expectedText("b", 9));
    await busy;
    expect([first.workers().length, second.workers().length]).toEqual([1, 0]);
  });

  test("a page that crashes does not hold up the others", async () => {
    const first = await another(true);
    await open(first);
    const second = await another(true);
    await open(second);
    await first.goto("chrome://crash").catch(() => undefined);
    expect(await ask(second, "z")).toBe(expectedText("z", 9));
  });
});
