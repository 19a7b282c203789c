import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { Program } from "../src/artifact/manifest.js";
import { parseManifest } from "../src/artifact/reader.js";
import type { DeviceClass } from "../src/protocol/backends.js";
import { ArtifactError, DeviceError, UnreachableError } from "../src/protocol/errors.js";
import { type Opened, type OpeningHooks, openBest } from "../src/worker/gpu/opening.js";
import { type Finalists, Steps, type TrialStage } from "../src/worker/gpu/trial.js";
import { Kept, type NoteFile } from "../src/worker/store/kept.js";
import { FakeBackend } from "./support/fake-backend.js";
import { sampleManifest } from "./support/manifest.js";

/** The programs of two classes, in two precisions. */
const able = programsNamed("integrated-f16", "integrated-f32", "discrete-f16", "discrete-f32");

/** A file that outlives its readers, like the browser's; `written` has its contents in order. */
class Notes implements NoteFile {
  readonly texts: string[] = [];
  /** Set to make every later write fail. */
  full = false;

  async read(): Promise<string | null> {
    return this.texts.at(-1) ?? null;
  }

  async write(text: string): Promise<void> {
    if (this.full) throw new DOMException("full", "QuotaExceededError");
    this.texts.push(text);
  }

  /** The program noted as being tried. */
  get trying(): string | null {
    const notes = JSON.parse(this.texts.at(-1) ?? "{}") as { trying?: { program: string } | null };
    return notes.trying?.program ?? null;
  }
}

interface Faults {
  readonly lost?: readonly string[];
  readonly full?: readonly string[];
  readonly large?: readonly string[];
  /** Programs whose files cannot be read, with the errors. */
  readonly absent?: Readonly<Record<string, Error>>;
  /** Errors that the steps of programs throw although the device works. */
  readonly thrown?: Readonly<Record<string, Error>>;
  /** Programs whose logits are not finite. */
  readonly wrong?: readonly string[];
}

/**
 * A device in plain code. Programs in `lost` make it lost, programs in `full` have no room, and programs in
 * `large` have room for a trial only.
 */
class FakeStage implements TrialStage {
  isGone = false;
  isClosed = false;
  readonly dropped: string[] = [];

  constructor(
    readonly programs: readonly Program[],
    private readonly faults: Required<Faults>,
    private readonly notes: Notes,
  ) {}

  async obtain({ name }: Program): Promise<void> {
    const problem = this.faults.absent[name];
    if (problem) throw problem;
  }

  async put({ name }: Program): Promise<FakeBackend> {
    expect(this.notes.full ? name : this.notes.trying, "noted before anything of it runs").toBe(name);
    if (this.faults.full.includes(name)) throw new DeviceError("no room");
    const backend = new FakeBackend({ contextLength: 300 });
    for (let g = 0; g < backend.shape.groups.length; g++)
      backend.write(`page_table.${g}`, new Int32Array(backend.shape.slots * backend.shape.pagesPerSlot));
    if (this.faults.wrong.includes(name)) backend.notFinite = () => true;
    const run = backend.run.bind(backend);
    backend.run = (...step) => {
      expect(this.notes.full ? name : this.notes.trying).toBe(name);
      const problem = this.faults.thrown[name];
      if (problem) throw problem;
      if (!this.faults.lost.includes(name)) return run(...step);
      this.isGone = true;
      throw new DeviceError("the driver was reset");
    };
    return backend;
  }

  async settle(program: Program): Promise<FakeBackend> {
    await this.obtain(program);
    if (this.faults.large.includes(program.name)) throw new DeviceError("no room for a cache");
    return new FakeBackend({ contextLength: 300 });
  }

  async drop({ name }: Program): Promise<void> {
    this.dropped.push(name);
  }

  async isLost(): Promise<boolean> {
    return this.isGone;
  }

  close(): void {
    this.isClosed = true;
  }
}

const WELL: Required<Faults> = { lost: [], full: [], large: [], absent: {}, thrown: {}, wrong: [] };

describe("trials", () => {
  let notes: Notes;
  let stages: FakeStage[];
  let told: string[];
  let passed: string[];
  beforeEach(() => {
    notes = new Notes();
    stages = [];
    told = [];
    passed = [];
    // A machine that is busy must not end a trial.
    let now = 0;
    vi.spyOn(performance, "now").mockImplementation(() => now++);
  });
  afterEach(() => vi.restoreAllMocks());

  const load = async (
    faults: Faults = {},
    options: { busy?: boolean; left?: readonly string[]; signal?: AbortSignal } = {},
  ): Promise<Opened<FakeStage, FakeBackend>> => {
    const { busy = false, left = [], signal = new AbortController().signal } = options;
    const kept = await Kept.open(notes, { busy, load: "this", hasLeft: async (of) => left.includes(of) });
    const open = async (first: Program, tried: readonly Program[]): Promise<FakeStage> => {
      const stage = new FakeStage(tried.length > 0 ? tried : [first], { ...WELL, ...faults }, notes);
      stages.push(stage);
      return stage;
    };
    const hooks: OpeningHooks = {
      signal,
      onTrying: ({ name }) => told.push(name),
      onChoice: ({ name }, { why }) => told.push(`${name} ${why}`),
      onPassedOver: ({ name }, error) => passed.push(`${name}: ${error}`),
    };
    return openBest(able, "integrated", kept, open, hooks);
  };

  test("are made once, over one device, and the choice is kept", async () => {
    const finalists = ["integrated-f16", "integrated-f32", "discrete-f16"];
    const { program, choice, stage } = await load();
    expect([choice.why, [...choice.seconds.keys()]]).toEqual(["timed", finalists]);
    expect(stages.map(({ programs }) => programs.map(({ name }) => name))).toEqual([finalists]);
    expect(stage.isClosed).toBe(false);
    expect(told).toEqual([...finalists, `${program.name} timed`]);
    expect(notes.trying).toBeNull();
    const again = await load();
    expect([again.program, again.choice.why]).toEqual([program, "kept"]);
    expect(stages[1]?.programs).toEqual([program]);
  });

  test("keep no winner that has no room as it would run", async () => {
    const { program: winner } = await load();
    notes.texts.length = 0;
    const { program } = await load({ large: [winner.name] });
    expect(program.name).not.toBe(winner.name);
    expect(notes.texts.join()).not.toContain(`:"${winner.name}"},"trying":null`);
    expect(stages.at(-1)?.dropped).toEqual([winner.name]);
  });

  test("are not made where another tab makes them", async () => {
    await notes.write(
      JSON.stringify({ lost: [], chosen: {}, trying: { program: "discrete-f16", load: "x" } }),
    );
    const { program, choice } = await load({}, { busy: true });
    expect([program.name, choice.why]).toEqual(["integrated-f16", "busy"]);
    expect(notes.texts).toHaveLength(1);
  });

  test("know a program that took its tab down, except for tabs that were left", async () => {
    const text = JSON.stringify({ lost: [], chosen: {}, trying: { program: "integrated-f16", load: "x" } });
    await notes.write(text);
    expect((await load({}, { left: ["x"] })).choice.seconds.has("integrated-f16")).toBe(true);
    await notes.write(text);
    expect([...(await load({}, { left: ["y"] })).choice.seconds.keys()]).toEqual([
      "integrated-f32",
      "discrete-f16",
      "discrete-f32",
    ]);
  });

  test("go on without a program that loses the device, for good", async () => {
    const { choice } = await load({ lost: ["integrated-f32"] });
    expect([...choice.seconds.keys()]).toEqual(["integrated-f16", "discrete-f16", "discrete-f32"]);
    expect(stages.map(({ isClosed }) => isClosed)).toEqual([true, false]);
    expect((await load()).choice.why).toBe("kept");
  });

  test("go on without a program that has no room, this time", async () => {
    const { choice } = await load({ full: ["integrated-f32"] });
    expect([...choice.seconds.keys()]).toEqual(["integrated-f16", "discrete-f16", "discrete-f32"]);
    const { seconds } = (await load()).choice;
    expect([...seconds.keys()]).toEqual(["integrated-f16", "integrated-f32", "discrete-f16"]);
  });

  test("end with the last that is left", async () => {
    const { program, choice, stage } = await load({ full: able.map(({ name }) => name) });
    expect([program.name, choice.why]).toEqual(["discrete-f32", "only"]);
    expect(stages.slice(0, -1).every(({ isClosed }) => isClosed)).toBe(true);
    expect(stage.isClosed).toBe(false);
  });

  test("hold for one load where nothing can be written", async () => {
    notes.full = true;
    expect((await load()).choice.why).toBe("timed");
    expect((await load()).choice.why).toBe("timed");
  });

  test("leave no note and no device when loading is aborted", async () => {
    const controller = new AbortController();
    const loading = load({}, { signal: controller.signal });
    controller.abort();
    await expect(loading).rejects.toMatchObject({ name: "AbortError" });
    expect(notes.trying).toBeNull();
    expect(stages.every(({ isClosed }) => isClosed)).toBe(true);
  });

  test.each([
    ["no bindings", new TypeError("no such bindings")],
    ["no compiler", new DeviceError("it does not compile")],
    ["no results", new DOMException("no results", "OperationError")],
  ])("pass over a program by name that fails, over the weights that are there: %s", async (_, error) => {
    const { choice } = await load({ thrown: { "integrated-f32": error } });
    expect([...choice.seconds.keys()]).toEqual(["integrated-f16", "discrete-f16", "discrete-f32"]);
    expect([stages.length, stages[0]?.isClosed, stages[0]?.dropped]).toEqual([1, false, ["integrated-f32"]]);
    expect(passed).toEqual([`integrated-f32: ${error}`]);
    expect(notes.texts.at(-1)).toContain('"lost":[]');
  });

  test("pass over a program whose logits are not finite", async () => {
    const { choice } = await load({ wrong: ["integrated-f16"] });
    expect([...choice.seconds.keys()]).toEqual(["integrated-f32", "discrete-f16", "discrete-f32"]);
    expect(passed).toEqual([expect.stringContaining("A step of integrated-f16 gave the token -1")]);
  });

  test("pass over a program whose files are corrupt, and end where all are", async () => {
    const absent = { "integrated-f16": new ArtifactError("a plan is corrupt") };
    const { choice } = await load({ absent });
    expect([...choice.seconds.keys()]).toEqual(["integrated-f32", "discrete-f16", "discrete-f32"]);
    const error = new ArtifactError("a kernel is corrupt");
    const all = Object.fromEntries(able.map(({ name }) => [name, error]));
    notes.texts.length = 0;
    await expect(load({ absent: all })).rejects.toBe(error);
    expect([notes.trying, stages.at(-1)?.isClosed]).toEqual([null, true]);
  });

  test("are made of what can be had, and another time of all", async () => {
    const error = new UnreachableError("offline");
    const absent = (...names: string[]): Readonly<Record<string, Error>> =>
      Object.fromEntries(names.map((name) => [name, error]));
    const one = await load({ absent: absent("integrated-f16", "integrated-f32", "discrete-f16") });
    expect([one.program.name, one.choice.why]).toEqual(["discrete-f32", "offline"]);
    expect([told, notes.texts]).toEqual([["discrete-f32 offline"], []]);
    const some = await load({ absent: absent("integrated-f32") });
    expect([...some.choice.seconds.keys()]).toEqual(["integrated-f16", "discrete-f16", "discrete-f32"]);
    const { choice } = await load();
    expect([...choice.seconds.keys()]).toEqual(["integrated-f16", "integrated-f32", "discrete-f16"]);
  });

  test("are made of the others where what was chosen once cannot be had or fails", async () => {
    const { program } = await load();
    const absent = { [program.name]: new UnreachableError("offline") };
    const offline = await load({ absent });
    expect([offline.choice.why, offline.choice.seconds.has(program.name)]).toEqual(["timed", false]);
    const large = await load({ large: [program.name] });
    expect([large.program.name === program.name, stages.at(-1)?.dropped]).toEqual([false, [program.name]]);
    expect((await load()).program).toBe(program);
  });

  test("say nothing of others' where they are not made", async () => {
    const text = JSON.stringify({ lost: [], chosen: {}, trying: { program: "discrete-f16", load: "x" } });
    await notes.write(text);
    const large = able.map(({ name }) => name);
    await expect(load({ large }, { busy: true })).rejects.toThrow("no room for a cache");
    expect(notes.texts).toEqual([text]);
  });

  test("run whole steps: of one token, and of the largest size", async () => {
    const backend = new FakeBackend({ contextLength: 300 });
    backend.write("page_table.0", new Int32Array(backend.shape.slots * backend.shape.pagesPerSlot));
    const steps = new Steps("p", backend, 300);
    expect(await steps.run("decode")).toBeGreaterThan(0);
    expect(await steps.run("large")).toBeGreaterThan(0);
    const greedy = { name: "greedy", size: 1 };
    expect(await new Steps("p", backend, 100).run("large"), "positions within the cache").toBeGreaterThan(0);
    expect(backend.runs.slice(0, 4)).toEqual([
      { name: "step", size: 1 },
      greedy,
      { name: "step", size: 256 },
      greedy,
    ]);
  });

  test("stay where the smallest cache has room", async () => {
    const backend = new FakeBackend({ contextLength: 300 });
    backend.write("page_table.0", new Int32Array(backend.shape.slots * backend.shape.pagesPerSlot));
    for (const kind of ["decode", "large"] as const) {
      await new Steps("p", backend, 100).run(kind);
      const [positions] = await backend.fetch([{ buffer: "positions", count: 256 }]);
      expect(Math.max(...(positions ?? []))).toBe(99);
    }
  });
});

describe("notes", () => {
  test("that are damaged are as good as none", async () => {
    const spoilt = [
      "",
      "{",
      "null",
      "[]",
      '{"lost":1,"chosen":{},"trying":null}',
      '{"lost":[1],"chosen":{}}',
    ];
    for (const text of spoilt) {
      const notes = new Notes();
      await notes.write(text);
      const kept = await Kept.open(notes, { busy: false, load: "this", hasLeft: async () => false });
      expect([kept.lost, kept.chosen(["a"])]).toEqual([[], null]);
      await kept.keep(["a", "b"], "b");
      const again = await Kept.open(notes, { busy: false, load: "that", hasLeft: async () => false });
      expect([again.chosen(["a", "b"]), again.chosen(["a", "c"])]).toEqual(["b", null]);
    }
  });
});

function programsNamed(...names: readonly [string, ...string[]]): Finalists {
  const described = sampleManifest();
  const [first] = described.programs;
  const made = names.map((name) => ({ ...first, name, device_class: name.split("-")[0] as DeviceClass }));
  const [one, ...others] = parseManifest(JSON.stringify({ ...described, programs: made })).programs;
  if (!one) throw new Error("there are programs");
  return [one, ...others];
}
