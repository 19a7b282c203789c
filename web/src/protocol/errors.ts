/**
 * The errors nearfar throws on purpose. Each message says what was wrong, with which value, and what to do;
 * its code is for programs (docs/errors.md).
 */

export type ErrorCode =
  | "webgpu-missing"
  | "no-adapter"
  | "device-unsuitable"
  | "device-lost"
  | "device-failed"
  | "out-of-memory"
  | "disposed"
  | "worker-failed"
  | "unreachable"
  | "not-found"
  | "not-an-artifact"
  | "artifact-unsuitable"
  | "artifact-damaged"
  | "invalid-request"
  | "unsupported"
  | "context-overflow"
  | "cloud-failed"
  | "no-route"
  | "internal";

/** The details of an error: its cause, and its code where the class has several. */
export interface ErrorDetails {
  readonly cause?: unknown;
  readonly code?: ErrorCode;
}

/** Base of all errors with a message meant for the user. */
export class NearfarError extends Error {
  constructor(
    readonly code: ErrorCode,
    message: string,
    details?: ErrorDetails,
  ) {
    super(message, details);
  }
}

/**
 * The most milliseconds that loading a file of the package may take; a stalled connection gives no error by
 * itself.
 */
const LIMIT_MS = 120_000;

/**
 * Loads a part of the package when it is needed; every dynamic import goes through this function.
 *
 * @throws NearfarError "unreachable" if the part's file cannot be loaded: offline, or after a deployment with
 * other files. The next call tries again.
 */
export async function later<Part>(load: () => Promise<Part>, what: string): Promise<Part> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no data has come for ${LIMIT_MS / 1000} s`)), LIMIT_MS);
  });
  try {
    return await Promise.race([load(), late]);
  } catch (cause) {
    const message =
      `${what} cannot be loaded (${cause}). Is this page offline, or older than the files on its server? ` +
      "Then reload the page.";
    throw new NearfarError("unreachable", message, { cause });
  } finally {
    clearTimeout(timer);
  }
}

/** The artifact is corrupt, incomplete, unreachable or of a newer format. */
export class ArtifactError extends NearfarError {
  override readonly name = "ArtifactError";
  constructor(message: string, details?: ErrorDetails) {
    super(details?.code ?? "artifact-damaged", message, details);
  }
}

/** A file of the artifact cannot be loaded now, offline or without a server; a later attempt may succeed. */
export class UnreachableError extends ArtifactError {
  constructor(message: string, details?: ErrorDetails) {
    super(message, { code: "unreachable", ...details });
  }
}

/** The device lacks a feature or memory that the artifact needs, or was lost. */
export class DeviceError extends NearfarError {
  override readonly name = "DeviceError";
  constructor(message: string, details?: ErrorDetails) {
    super(details?.code ?? "device-failed", message, details);
  }
}

/** The driver gave up the device, and everything on it is gone. An engine reopens it. */
export class DeviceLostError extends DeviceError {
  constructor(message: string, details?: ErrorDetails) {
    super(message, { code: "device-lost", ...details });
  }
}

/** There was no memory for the requested work on the device. An engine continues with smaller steps. */
export class OutOfMemoryError extends DeviceError {
  constructor(message: string, details?: ErrorDetails) {
    super(message, { code: "out-of-memory", ...details });
  }
}

/** A request asks for something impossible; `param` names the offending parameter. */
export class RequestError extends NearfarError {
  override readonly name = "RequestError";
  constructor(
    message: string,
    readonly param: string | null = null,
    details?: ErrorDetails,
  ) {
    super(details?.code ?? "invalid-request", message, details);
  }
}

/** The cloud cannot be reached, rejects the request, or broke off its answer. */
export class CloudError extends NearfarError {
  override readonly name = "CloudError";
  /** The seconds that the server asked to wait; null if it gave none. */
  readonly retryAfter: number | null;
  constructor(
    message: string,
    /** A short reason: an HTTP status, "timeout", "connection", "cut", "error", "shape". */
    readonly reason: string,
    details: ErrorDetails & { readonly retryAfter?: number | null } = {},
  ) {
    super("cloud-failed", message, details);
    this.retryAfter = details.retryAfter ?? null;
  }
}

/** Neither device nor cloud can or may answer; the message gives the reasons. */
export class RouteError extends NearfarError {
  override readonly name = "RouteError";
  constructor(message: string, details?: ErrorDetails) {
    super("no-route", message, details);
  }
}

/** The error of every call, and of every pending answer, after the engine was disposed. */
export function disposedError(): DeviceError {
  return new DeviceError("The engine was disposed. Create a new one.", { code: "disposed" });
}

/** The error of a load or an answer that `signal` aborts: the signal's reason, as with fetch(). */
export function abortReason(signal: AbortSignal | undefined): unknown {
  // Browsers that are as old as WebAssembly SIMD may lack `reason`.
  return signal?.reason ?? new DOMException("The operation was aborted.", "AbortError");
}

export function throwIfAborted(signal: AbortSignal | undefined): void {
  if (signal?.aborted) throw abortReason(signal);
}

/**
 * Makes a controller that aborts with `signal`. It does not use AbortSignal.any, which is missing in browsers
 * that have WebAssembly SIMD; Node warns of the eleventh listener of a signal.
 */
export function linkedAbort(signal: AbortSignal | undefined): {
  readonly signal: AbortSignal;
  /** Aborts, and removes the listener from `signal`. */
  readonly stop: () => void;
} {
  const controller = new AbortController();
  if (signal && typeof AbortSignal.any === "function") {
    const joined = AbortSignal.any([signal, controller.signal]);
    return { signal: joined, stop: () => controller.abort(signal.reason) };
  }
  const stop = (): void => {
    signal?.removeEventListener("abort", stop);
    controller.abort(signal?.reason);
  };
  if (signal?.aborted) stop();
  else signal?.addEventListener("abort", stop);
  return { signal: controller.signal, stop };
}

/** The message for an error that is not from this package. */
export function namedMessage(error: unknown): string {
  return error instanceof Error ? `${error.name}: ${error.message}` : String(error);
}

/** An error in a form that survives postMessage with its class and code. */
export interface ErrorRecord {
  readonly kind: "artifact" | "device" | "request" | "abort" | "internal";
  readonly code: ErrorCode;
  readonly message: string;
  readonly param: string | null;
  readonly stack: string | null;
}

export function toErrorRecord(error: unknown): ErrorRecord {
  const message = error instanceof Error ? error.message : String(error);
  const stack = error instanceof Error ? (error.stack ?? null) : null;
  const code = error instanceof NearfarError ? error.code : "internal";
  const param = error instanceof RequestError ? error.param : null;
  return { kind: kindOf(error), code, message, param, stack };
}

function kindOf(error: unknown): ErrorRecord["kind"] {
  if (error instanceof RequestError) return "request";
  if (error instanceof ArtifactError) return "artifact";
  if (error instanceof DeviceError) return "device";
  return error instanceof DOMException && error.name === "AbortError" ? "abort" : "internal";
}

export function fromErrorRecord({ kind, code, message, param, stack }: ErrorRecord): Error {
  switch (kind) {
    case "artifact":
      return new ArtifactError(message, { code });
    case "device":
      return new DeviceError(message, { code });
    case "request":
      return new RequestError(message, param, { code });
    case "abort":
      return new DOMException(message, "AbortError");
    case "internal":
      return new NearfarError(code, message, { cause: stack });
  }
}

/** The end of a sentence that suggests the closest known name, or else to leave the name out. */
export function meant(name: string, known: readonly string[]): string {
  const asked = letters(name);
  const close = known.find((one) => apart(asked, letters(one)) <= (asked.length > 5 ? 2 : 1));
  return close === undefined ? "; leave it out" : `: did you mean ${close}?`;
}

function letters(name: string): string {
  return name.toLowerCase().replace(/[^a-z]/g, "");
}

/** The edit distance: the number of letters to insert, remove or replace to turn one text into the other. */
function apart(from: string, to: string): number {
  let row = Array.from({ length: to.length + 1 }, (_, at) => at);
  for (const [above, letter] of [...from].entries()) {
    const made = [above + 1];
    for (const [at, other] of [...to].entries())
      made.push(
        Math.min((made[at] ?? 0) + 1, (row[at + 1] ?? 0) + 1, (row[at] ?? 0) + Number(letter !== other)),
      );
    row = made;
  }
  return row[to.length] ?? 0;
}
