import {
  ArtifactError,
  abortReason,
  DeviceError,
  type ErrorCode,
  type ErrorDetails,
  linkedAbort,
  throwIfAborted,
  UnreachableError,
} from "../protocol/errors.js";

export type Fetch = (url: URL, init: RequestInit) => Promise<Response>;

export interface DownloadOptions {
  readonly fetch?: Fetch | undefined;
  readonly signal?: AbortSignal | undefined;
  readonly cache?: RequestCache;
  /**
   * Called when the response begins, with the number of bytes that were there before and that it continues
   * from.
   */
  readonly onStart?: (received: number) => void;
  /** Called with the number of bytes of this file received so far, and with them at the beginning of it. */
  readonly onBytes?: (received: number, bytes: Uint8Array<ArrayBuffer>) => void;
}

/** Milliseconds that a server may send nothing, because a stalled connection gives no error by itself. */
export const SILENCE_MS = 30_000;

/** The beginning of a file whose download broke off. */
export interface PartialDownload {
  /** The bytes; the array is as long as the whole file. */
  readonly bytes: Uint8Array<ArrayBuffer>;
  readonly received: number;
}

/**
 * Returns the address of a file of the artifact at `base`. Throws ArtifactError for a file outside of `base`,
 * however it is written.
 */
export function within(base: URL, file: string): URL {
  const url = new URL(file, base);
  if (url.origin !== base.origin || !url.pathname.startsWith(new URL(".", base).pathname))
    throw new ArtifactError(`${file} lies outside the artifact at ${base.href}. Build the artifact again.`);
  return url;
}

/**
 * `retry`: whether a second try may succeed (a broken connection) or cannot (404). `part`: the bytes that
 * came before.
 */
export type Download =
  | { readonly ok: true; readonly bytes: Uint8Array<ArrayBuffer> }
  | {
      readonly ok: false;
      readonly problem: string;
      readonly code: ErrorCode;
      readonly retry: boolean;
      readonly part?: PartialDownload;
    };

/**
 * Downloads a file of known size; for a partly downloaded one the rest, if the server supports ranges.
 * Rejects only when aborted; other failures are in the result.
 */
export async function download(
  url: URL,
  size: number,
  options: DownloadOptions,
  begun?: PartialDownload,
): Promise<Download> {
  throwIfAborted(options.signal);
  const bytes = begun?.bytes ?? new Uint8Array(size);
  let received = 0;
  const exchange = new Exchange(options);
  try {
    const response = await exchange.open(url, begun && `bytes=${begun.received}-`);
    // The file is shorter than the stored part, which must belong to another file.
    if (begun && response.status === RANGE_REFUSED)
      return { ok: false, problem: `${url.href} has no byte ${begun.received}`, code: DAMAGED, retry: true };
    if (!response.ok) {
      const problem = `${url.href} answers HTTP ${response.status} ${response.statusText}`.trimEnd();
      return { ok: false, problem, code: codeOf(response.status), retry: response.status >= 500 };
    }
    if (begun && response.status === PARTIAL) {
      // Other origins' pages see this header only if the server exposes it, which buckets do not by default.
      // Without it, the hash decides whether the bytes are the right ones.
      const range = response.headers.get("content-range");
      if (range !== null && !range.startsWith(`bytes ${begun.received}-`)) {
        const problem = `${url.href} answers with ${range}, not from byte ${begun.received} on`;
        return { ok: false, problem, code: DAMAGED, retry: true };
      }
      received = begun.received;
    }
    // A server without ranges starts at the beginning.
    options.onStart?.(received);
    for (const reader = response.body?.getReader(); reader; ) {
      const { done, value } = await exchange.heard(reader.read());
      if (done) break;
      if (received + value.length > size) {
        const problem = `${url.href} is longer than the ${size} bytes that manifest.json states`;
        return { ok: false, problem, code: DAMAGED, retry: true };
      }
      bytes.set(value, received);
      received += value.length;
      options.onBytes?.(received, bytes);
    }
    if (received === size) return { ok: true, bytes };
    const problem = `${url.href} is truncated: ${received} of ${size} bytes`;
    return { ok: false, problem, code: DAMAGED, retry: true, part: { bytes, received } };
  } catch (error) {
    if (options.signal?.aborted) throw abortReason(options.signal);
    const problem = `${url.href} cannot be downloaded: ${reasonOf(error)}`;
    return { ok: false, problem, code: "unreachable", retry: true, part: { bytes, received } };
  } finally {
    exchange.end();
  }
}

const PARTIAL = 206;
const RANGE_REFUSED = 416;

/** One request and its response, which fails when the server sends nothing for SILENCE_MS. */
class Exchange {
  readonly #abort: ReturnType<typeof linkedAbort>;

  constructor(private readonly options: DownloadOptions) {
    this.#abort = linkedAbort(options.signal);
  }

  /** Sends the request and returns the response, whose body has not been read. */
  open(url: URL, range?: string): Promise<Response> {
    const { fetch = globalThis.fetch, cache } = this.options;
    const init: RequestInit = { signal: this.#abort.signal };
    if (cache) init.cache = cache;
    if (range) init.headers = { range };
    // `fetch` is called as a plain function, because the browser's fetch rejects any other `this`.
    return this.heard(fetch(url, init));
  }

  /** Waits for the server's next bytes, at most SILENCE_MS. */
  heard<T>(next: Promise<T>): Promise<T> {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(
        () => reject(new Error(`the server has sent nothing for ${SILENCE_MS / 1000} s`)),
        SILENCE_MS,
      );
      next.then(resolve, reject).finally(() => clearTimeout(timer));
    });
  }

  /** Reads all bytes of a response. */
  async bytesOf(response: Response): Promise<Uint8Array<ArrayBuffer>> {
    const pieces: BlobPart[] = [];
    for (const reader = response.body?.getReader(); reader; ) {
      const { done, value } = await this.heard(reader.read());
      if (done) break;
      pieces.push(value);
    }
    return new Uint8Array(await new Blob(pieces).arrayBuffer());
  }

  /** Ends the request if its response is not complete. */
  end(): void {
    this.#abort.stop();
  }
}

function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** A file that its server does not have. */
export class MissingError extends ArtifactError {
  constructor(message: string, details?: ErrorDetails) {
    super(message, { code: "not-found", ...details });
  }
}

/** Statuses for missing files; some servers do not reveal whether a file exists. */
const MISSING = [403, 404, 410];
const DAMAGED = "artifact-damaged";

function codeOf(status: number): ErrorCode {
  return MISSING.includes(status) ? "not-found" : "unreachable";
}

/** The text of a small file, checked against its SHA-256 where one is known. */
export async function fetchText(url: URL, sha256: string | null, options: DownloadOptions): Promise<string> {
  return new TextDecoder().decode(await fetchBytes(url, sha256, options));
}

/** The bytes of a small file, checked against its SHA-256 if one is known. */
export async function fetchBytes(
  url: URL,
  sha256: string | null,
  options: DownloadOptions,
): Promise<Uint8Array<ArrayBuffer>> {
  throwIfAborted(options.signal);
  let response: Response;
  let bytes: Uint8Array<ArrayBuffer>;
  const exchange = new Exchange(options);
  try {
    response = await exchange.open(url);
    bytes = await exchange.bytesOf(response);
  } catch (cause) {
    if (options.signal?.aborted) throw abortReason(options.signal);
    const advice = "Check address and network; a server of another origin must allow this page (CORS).";
    throw new UnreachableError(`${url.href} cannot be downloaded: ${reasonOf(cause)}. ${advice}`, { cause });
  } finally {
    exchange.end();
  }
  if (!response.ok) {
    const answer = `${url.href} answers HTTP ${response.status}`;
    throw codeOf(response.status) === "not-found"
      ? new MissingError(`${answer}. Is the artifact's address right?`)
      : new UnreachableError(`${answer}. Try again later.`);
  }
  if (sha256 !== null && (await sha256Hex(bytes)) !== sha256)
    throw new ArtifactError(
      `${url.href} is corrupt: its SHA-256 is not the one in manifest.json. Upload the artifact again.`,
    );
  return bytes;
}

export async function sha256Hex(bytes: Uint8Array<ArrayBuffer>): Promise<string> {
  // TypeScript's types say that `subtle` always exists, but insecure pages lack it.
  if ((crypto.subtle as SubtleCrypto | undefined) === undefined)
    throw new DeviceError(
      "This address is not secure, so the browser cannot verify the artifact (no crypto.subtle). Open " +
        "the page over https, or through localhost.",
      { code: "device-unsuitable" },
    );
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
