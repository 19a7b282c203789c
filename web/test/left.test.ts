import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { hasLeft, noteLeft, watchLeaving } from "../src/page/left.js";
import { Kept, type NoteFile } from "../src/worker/store/kept.js";

/** Storage that the pages of an origin share; other names are plain properties, as in browsers. */
class SharedStorage {
  [key: string]: unknown;
}
Object.assign(SharedStorage.prototype, {
  getItem(this: SharedStorage, key: string): unknown {
    return Object.hasOwn(this, key) ? this[key] : null;
  },
  setItem(this: SharedStorage, key: string, value: string): void {
    this[key] = value;
  },
  removeItem(this: SharedStorage, key: string): void {
    delete this[key];
  },
});

let events: EventTarget;
beforeEach(() => {
  events = new EventTarget();
  vi.stubGlobal("localStorage", new SharedStorage());
  vi.stubGlobal("addEventListener", events.addEventListener.bind(events));
});
afterEach(() => vi.unstubAllGlobals());

test("a page that is left is known at once, and one whose word comes a moment later too", async () => {
  noteLeft("one");
  expect(await hasLeft("one")).toBe(true);
  const asked = hasLeft("two");
  noteLeft("two");
  events.dispatchEvent(Object.assign(new Event("storage"), { key: "nearfar.left.two" }));
  expect(await asked).toBe(true);
  expect(await hasLeft("three")).toBe(false);
});

test("words of pages that are left together stay, and old ones go", async () => {
  const now = vi.spyOn(Date, "now");
  for (let i = 0; i < 20; i++) {
    now.mockReturnValue(i);
    noteLeft(`load ${i}`);
  }
  now.mockRestore();
  expect(Object.keys(localStorage)).toHaveLength(16);
  expect([await hasLeft("load 19"), await hasLeft("load 4"), await hasLeft("load 3")]).toEqual([
    true,
    true,
    false,
  ]);
});

test("is asked for once a note is found that nobody holds, and no sooner", async () => {
  const text = JSON.stringify({ lost: [], chosen: {}, trying: { program: "p", load: "x" } });
  const asked: string[] = [];
  const hasLeft = async (load: string): Promise<boolean> => {
    asked.push(load);
    return true;
  };
  const file = (found: string | null): NoteFile => ({
    read: async () => {
      expect(asked, "not before the notes are read").toEqual([]);
      return found;
    },
    write: async () => undefined,
  });
  await Kept.open(file(null), { busy: false, load: "this", hasLeft });
  await Kept.open(file(text), { busy: true, load: "this", hasLeft });
  expect(asked).toEqual([]);
  const kept = await Kept.open(file(text), { busy: false, load: "this", hasLeft });
  expect([asked, kept.lost]).toEqual([["x"], []]);
});

test("a page that nobody sees counts as left, also one that was opened so, until somebody does", async () => {
  const page = Object.assign(new EventTarget(), { visibilityState: "hidden" });
  vi.stubGlobal("document", page);
  const settle = watchLeaving("hidden");
  expect(await hasLeft("hidden")).toBe(true);
  page.visibilityState = "visible";
  page.dispatchEvent(new Event("visibilitychange"));
  watchLeaving("seen");
  expect(Object.keys(localStorage)).toEqual([]);
  page.visibilityState = "hidden";
  page.dispatchEvent(new Event("visibilitychange"));
  expect(Object.keys(localStorage)).toEqual(["nearfar.left.hidden", "nearfar.left.seen"]);
  settle();
});
