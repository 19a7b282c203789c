import { createHash } from "node:crypto";
import { createServer, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import type { FileEntry } from "../src/artifact/manifest.js";
import { ArtifactError } from "../src/protocol/errors.js";
import { BegunFile } from "../src/storage/begun.js";
import type { FileCache } from "../src/storage/file-cache.js";
import { fetchText, SILENCE_MS } from "../src/storage/http.js";
import { type ShardOptions, type ShardProgress, streamShards } from "../src/worker/store/shards.js";

const CONTENTS = [1, 2, 3].map((salt) => Uint8Array.from({ length: 5000 }, (_, i) => (i * salt) % 256));
const sha256 = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex");
const SHARDS: FileEntry[] = CONTENTS.map((bytes, i) => ({
  file: `weights/${i}.bin`,
  bytes: 5000,
  sha256: sha256(bytes),
}));

type Handler = (index: number, attempt: number, response: ServerResponse) => unknown;
const serve: Handler = (index, _, response) => response.end(CONTENTS[index]);

class MemoryCache implements FileCache {
  readonly files = new Map<string, Uint8Array<ArrayBuffer>>();
  get = async (key: string) => this.files.get(key) ?? null;
  put = async (key: string, bytes: Uint8Array<ArrayBuffer>) => void this.files.set(key, bytes.slice());
  delete = async (key: string) => void this.files.delete(key);
}

let server: Server;
let base: URL;
let handler: Handler;
let requests: number[];

beforeEach(async () => {
  handler = serve;
  requests = [];
  server = createServer((request, response) => {
    const index = Number(/(\d+)\.bin/.exec(request.url ?? "")?.[1]);
    const attempt = requests.filter((earlier) => earlier === index).length;
    requests.push(index);
    handler(index, attempt, response);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  base = new URL(`http://127.0.0.1:${(server.address() as AddressInfo).port}/artifact/`);
});
afterEach(() => {
  server.closeAllConnections();
  server.close();
});

async function load(options: Partial<ShardOptions> = {}): Promise<Uint8Array[]> {
  const loaded: Uint8Array[] = [];
  for await (const shard of streamShards(base, SHARDS, { cache: null, ...options })) loaded.push(shard);
  return loaded;
}

describe("shards", () => {
  test("come in order, with progress in bytes", async () => {
    const seen: ShardProgress[] = [];
    expect(await load({ onProgress: (progress) => seen.push(progress) })).toEqual(CONTENTS);
    expect(seen.at(-1)).toEqual({
      loaded: 15_000,
      cached: 0,
      verified: 15_000,
      uploaded: 15_000,
      total: 15_000,
    });
  });

  test("come from the cache at the second time", async () => {
    const cache = new MemoryCache();
    await load({ cache });
    const seen: ShardProgress[] = [];
    expect(await load({ cache, onProgress: (progress) => seen.push(progress) })).toEqual(CONTENTS);
    expect(requests).toHaveLength(3);
    expect(seen.at(-1)).toEqual({
      loaded: 15_000,
      cached: 15000,
      verified: 15_000,
      uploaded: 15_000,
      total: 15_000,
    });
  });

  test("corrupt in the cache are downloaded again", async () => {
    const cache = new MemoryCache();
    await load({ cache });
    cache.files.get(SHARDS[1]?.sha256 ?? "")?.fill(0);
    const warnings: string[] = [];
    expect(await load({ cache, onWarning: (message) => warnings.push(message) })).toEqual(CONTENTS);
    expect(requests).toEqual([0, 1, 2, 1]);
    expect(warnings).toEqual(["The cached copy of weights/1.bin is corrupt; downloading it again."]);
    await load({ cache });
    expect(requests).toHaveLength(4);
  });

  test("corrupt from the network are tried twice, then named", async () => {
    handler = (index, attempt, response) =>
      response.end(index === 1 && attempt === 0 ? CONTENTS[0] : CONTENTS[index]);
    expect(await load()).toEqual(CONTENTS);
    expect(requests.filter((index) => index === 1)).toHaveLength(2);
    handler = (index, _, response) => response.end(index === 2 ? CONTENTS[0] : CONTENTS[index]);
    await expect(load()).rejects.toThrow(/weights\/2\.bin cannot be loaded\. .* is corrupt: its SHA-256 is/);
  });

  test("truncated or too long are refused", async () => {
    handler = (index, _, response) => response.end(CONTENTS[index]?.subarray(0, 4000));
    await expect(load()).rejects.toThrow(/0\.bin is truncated: 4000 of 5000 bytes/);
    handler = (_, __, response) => response.end(new Uint8Array(6000));
    await expect(load()).rejects.toThrow(/longer than the 5000 bytes/);
  });

  test("that are missing are named with the status, once", async () => {
    handler = (index, attempt, response) => {
      if (index === 1) response.writeHead(404).end();
      else serve(index, attempt, response);
    };
    const failed = load();
    await expect(failed).rejects.toThrow(ArtifactError);
    await expect(failed).rejects.toMatchObject({ code: "not-found" });
    await expect(failed).rejects.toThrow(/weights\/1\.bin cannot be loaded\. http:.* answers HTTP 404/);
    expect(requests.filter((index) => index === 1)).toHaveLength(1);
  });

  test("that cannot be had now are told apart from those that are damaged", async () => {
    handler = (_, __, response) => response.writeHead(503).end();
    await expect(load()).rejects.toMatchObject({ name: "ArtifactError", code: "unreachable" });
    handler = (_, __, response) => response.socket?.destroy();
    await expect(load()).rejects.toMatchObject({ name: "ArtifactError", code: "unreachable" });
    handler = (_, __, response) => response.end(CONTENTS[0]?.subarray(0, 4000));
    await expect(load()).rejects.toMatchObject({ name: "ArtifactError", code: "artifact-damaged" });
  });

  test("survive one broken connection", async () => {
    handler = (index, attempt, response) => {
      if (index === 0 && attempt === 0) response.socket?.destroy();
      else serve(index, attempt, response);
    };
    expect(await load()).toEqual(CONTENTS);
  });

  test("go on where a connection broke, where the server gives parts; else from the start", async () => {
    const ranges: (string | undefined)[] = [];
    const answers = (parts: boolean): Handler => {
      return (index, attempt, response) => {
        const bytes = CONTENTS[index] ?? new Uint8Array();
        const range = response.req.headers.range;
        if (index !== 1) return response.end(bytes);
        ranges.push(range);
        const start = parts ? Number(/bytes=(\d+)-/.exec(range ?? "bytes=0-")?.[1]) : 0;
        if (start > 0) response.writeHead(206, { "content-range": `bytes ${start}-4999/5000` });
        else response.writeHead(200, { "content-length": 5000 });
        // Downloads of parts break three times, those of whole files once.
        if (attempt >= (parts ? 3 : 1)) return response.end(bytes.subarray(start));
        return response.write(bytes.subarray(start, start + 1500), () =>
          setTimeout(() => response.socket?.destroy(), 30),
        );
      };
    };
    handler = answers(true);
    expect(await load()).toEqual(CONTENTS);
    expect(ranges).toEqual([undefined, "bytes=1500-", "bytes=3000-", "bytes=4500-"]);
    [ranges.length, requests.length] = [0, 0];
    handler = answers(false);
    expect(await load()).toEqual(CONTENTS);
    expect(ranges).toEqual([undefined, "bytes=1500-"]);
  });

  const whole: readonly (string | undefined)[] = [undefined, "bytes=1500-", undefined];
  test.each<[string, number, Record<string, string>, number, typeof whole]>([
    // A page of another origin does not see this header of a bucket with plain CORS headers.
    ["a part whose place is not told", 206, {}, 1500, [undefined, "bytes=1500-"]],
    ["another part, whose place is not told", 206, {}, 1000, whole],
    ["another part", 206, { "content-range": "bytes 1000-4999/5000" }, 1000, whole],
    ["that there is no such part", 416, { "content-range": "bytes */1400" }, 5000, whole],
  ])("whose server answers with %s load all the same", async (_, status, headers, start, expected) => {
    const ranges: (string | undefined)[] = [];
    handler = (index, attempt, response) => {
      const bytes = CONTENTS[index] ?? new Uint8Array();
      if (index !== 1) return response.end(bytes);
      const { range } = response.req.headers;
      ranges.push(range);
      if (range) return response.writeHead(status, headers).end(bytes.subarray(start));
      if (attempt > 0) return response.end(bytes);
      response.writeHead(200, { "content-length": 5000 });
      return response.write(bytes.subarray(0, 1500), () => setTimeout(() => response.socket?.destroy(), 30));
    };
    expect(await load()).toEqual(CONTENTS);
    expect(ranges).toEqual(expected);
  });

  describe("of a server that stalls", () => {
    beforeEach(() => void vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout"] }));
    afterEach(() => void vi.useRealTimers());
    test("go on where it stalled", async () => {
      const ranges: (string | undefined)[] = [];
      handler = (index, _, response) => {
        const bytes = CONTENTS[index];
        const { range } = response.req.headers;
        if (index !== 1) return response.end(bytes);
        ranges.push(range);
        if (range) return response.writeHead(206).end(bytes?.subarray(1500));
        return response.writeHead(200, { "content-length": 5000 }).write(bytes?.subarray(0, 1500));
      };
      let stalls = false;
      const onProgress = ({ loaded }: ShardProgress): void => {
        // At this time the shard waits for more bytes, and the previous one is complete.
        if (loaded % 5000 !== 1500 || loaded < 5000 || stalls) return;
        stalls = true;
        setImmediate(() => vi.advanceTimersByTime(SILENCE_MS));
      };
      expect(await load({ onProgress })).toEqual(CONTENTS);
      expect(ranges).toEqual([undefined, "bytes=1500-"]);
    });

    test("for ever are unreachable, and so are small files", async () => {
      handler = () => vi.advanceTimersByTime(SILENCE_MS);
      const error = { code: "unreachable", message: expect.stringContaining("has sent nothing for 30 s") };
      await expect(load()).rejects.toMatchObject(error);
      expect(requests.length).toBeLessThanOrEqual(2);
      await expect(fetchText(new URL("0.bin", base), null, {})).rejects.toMatchObject(error);
    });
  });

  test("that went on from wrong bytes are downloaded from the start", async () => {
    const ranges: (string | undefined)[] = [];
    handler = (index, attempt, response) => {
      const bytes = CONTENTS[index] ?? new Uint8Array();
      if (index !== 1) return response.end(bytes);
      const { range } = response.req.headers;
      ranges.push(range);
      const start = Number(/bytes=(\d+)-/.exec(range ?? "bytes=0-")?.[1]);
      if (start > 0) response.writeHead(206, { "content-range": `bytes ${start}-4999/5000` });
      else response.writeHead(200, { "content-length": 5000 });
      if (attempt > 0) return response.end(bytes.subarray(start));
      return response.write(new Uint8Array(1500), () => setTimeout(() => response.socket?.destroy(), 30));
    };
    expect(await load()).toEqual(CONTENTS);
    expect(ranges).toEqual([undefined, "bytes=1500-", undefined]);
  });

  test("load without a cache when the storage is full, with one warning", async () => {
    const cache = new MemoryCache();
    cache.put = () => Promise.reject(new DOMException("no room", "QuotaExceededError"));
    const warnings: string[] = [];
    expect(await load({ cache, onWarning: (message) => warnings.push(message) })).toEqual(CONTENTS);
    expect(warnings).toHaveLength(1);
    expect(warnings[0]).toMatch(/QuotaExceededError: no room.*next visit downloads/);
  });

  test("stop at once when aborted", async () => {
    const controller = new AbortController();
    handler = (index, attempt, response) => {
      if (index < 1) serve(index, attempt, response);
      else setTimeout(() => controller.abort(), 20);
    };
    await expect(load({ signal: controller.signal })).rejects.toMatchObject({ name: "AbortError" });
  });

  test("are loaded two at a time", async () => {
    const held: (() => void)[] = [];
    handler = (index, attempt, response) => void held.push(() => serve(index, attempt, response));
    const stream = streamShards(base, SHARDS, { cache: null });
    const first = stream.next();
    await vi.waitFor(() => expect(requests).toEqual([0, 1]), 20_000);
    for (const answer of held) answer();
    expect((await first).value).toEqual(CONTENTS[0]);
    await stream.return(undefined);
  });

  test("are two in memory at most", async () => {
    const stream = streamShards(base, SHARDS, { cache: null });
    await stream.next();
    await new Promise((resolve) => setTimeout(resolve, 50));
    expect(requests).toEqual([0, 1]);
    await stream.return(undefined);
  });
});

describe("a file that comes in parts", () => {
  /** A directory in memory with the methods that BegunFile uses. */
  class Directory {
    readonly files = new Map<string, number[]>();
    written = 0;
    writes = 0;
    /** Bytes that still fit. */
    room = Number.POSITIVE_INFINITY;
    removeEntry = async (name: string) => void this.files.delete(name);
    getFileHandle = async (name: string) => ({
      move: async (to: string) => {
        this.files.set(to, this.files.get(name) ?? []);
        this.files.delete(name);
      },
      createSyncAccessHandle: async () => {
        const bytes = this.files.get(name) ?? [];
        this.files.set(name, bytes);
        return {
          getSize: () => bytes.length,
          read: (into: Uint8Array, { at }: { at: number }) => into.set(bytes.slice(at, at + into.length)),
          write: (more: Uint8Array, { at }: { at: number }) => {
            const fits = more.subarray(0, Math.max(this.room - at, 0));
            bytes.splice(at, fits.length, ...fits);
            this.written += fits.length;
            this.writes++;
            return fits.length;
          },
          truncate: (size: number) => void bytes.splice(size),
          close: () => undefined,
        };
      },
    });
    open = () => BegunFile.open(this as unknown as FileSystemDirectoryHandle, "sha");
  }
  const bytes = Uint8Array.from({ length: 100 }, (_, i) => i);

  test("is written once, and gets its name when it is whole", async () => {
    const directory = new Directory();
    const first = await directory.open();
    first?.extend(bytes, 30);
    first?.extend(bytes, 60);
    await first?.close();
    const next = await directory.open();
    const part = next?.read(100);
    expect(part?.received).toBe(60);
    part?.bytes.set(bytes.subarray(60), 60);
    next?.goOnFrom(60);
    next?.extend(part?.bytes ?? bytes, 100);
    expect(await next?.keep("sha", 100)).toBe(true);
    expect(directory.written).toBe(100);
    expect(Object.fromEntries(directory.files)).toEqual({ sha: [...bytes] });
  });

  test("is written in large pieces, and soon also where a download is slow", async () => {
    vi.useFakeTimers();
    try {
      const directory = new Directory();
      const begun = await directory.open();
      for (let received = 1; received <= 30; received++) begun?.extend(bytes, received);
      expect(directory.writes).toBe(0);
      vi.advanceTimersByTime(60);
      expect([directory.writes, directory.written]).toEqual([1, 30]);
      for (let received = 31; received <= 100; received++) begun?.extend(bytes, received);
      expect(await begun?.keep("sha", 100)).toBe(true);
      expect([directory.writes, directory.written]).toEqual([2, 100]);
    } finally {
      vi.useRealTimers();
    }
  });

  test("has no bytes of another try, and is not kept where it is not whole", async () => {
    const directory = new Directory();
    directory.files.set("sha.begun", Array(50).fill(255));
    const begun = await directory.open();
    expect(begun?.read(100)?.received).toBe(50);
    // The server starts from the beginning, with a longer file than before.
    begun?.goOnFrom(0);
    begun?.extend(bytes, 80);
    begun?.extend(bytes, 100);
    expect(await begun?.keep("sha", 100)).toBe(true);
    expect(directory.files.get("sha")).toEqual([...bytes]);
    directory.files.clear();
    directory.room = 70;
    const full = await directory.open();
    full?.extend(bytes, 100);
    expect(await full?.keep("sha", 100)).toBe(false);
    expect(directory.files.size).toBe(0);
  });
});
