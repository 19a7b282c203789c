/**
 * The errors nearfar throws on purpose. Each message says what was wrong, with which value, and what to do.
 */

export type ErrorCode = "artifact" | "device" | "request" | "cloud" | "route";

/** Base of all errors with a message meant for the user. */
export class NearfarError extends Error {
  constructor(
    readonly code: ErrorCode,
    message: string,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** The artifact is corrupt, incomplete, unreachable or of a newer format. */
export class ArtifactError extends NearfarError {
  override readonly name = "ArtifactError";
  constructor(message: string, options?: ErrorOptions) {
    super("artifact", message, options);
  }
}

/** A file of the artifact cannot be had now: offline, or no server there. Another time it may be. */
export class UnreachableError extends ArtifactError {}

/** The device lacks a feature or memory that the artifact needs, or was lost. */
export class DeviceError extends NearfarError {
  override readonly name = "DeviceError";
  constructor(message: string, options?: ErrorOptions) {
    super("device", message, options);
  }
}

/** The driver gave the device up, and everything on it is gone. An engine opens it anew. */
export class DeviceLostError extends DeviceError {}

/** There was no memory for what was asked of the device. An engine goes on with smaller steps. */
export class OutOfMemoryError extends DeviceError {}

/** A request asks for something impossible; `param` names the offending parameter. */
export class RequestError extends NearfarError {
  override readonly name = "RequestError";
  constructor(
    message: string,
    readonly param: string | null = null,
    options?: ErrorOptions,
  ) {
    super("request", message, options);
  }
}

/** The cloud cannot be reached, refuses, or broke off. */
export class CloudError extends NearfarError {
  override readonly name = "CloudError";
  /** Seconds that the server asked to wait; null where it said nothing. */
  readonly retryAfter: number | null;
  constructor(
    message: string,
    /** Short, for reasons: an HTTP status, "timeout", "connection", "cut", "error", "shape". */
    readonly reason: string,
    options: ErrorOptions & { readonly retryAfter?: number | null } = {},
  ) {
    super("cloud", message, options);
    this.retryAfter = options.retryAfter ?? null;
  }
}

/** Neither device nor cloud may or can answer; the message names the reasons. */
export class RouteError extends NearfarError {
  override readonly name = "RouteError";
  constructor(message: string, options?: ErrorOptions) {
    super("route", message, options);
  }
}

/** What an aborted load or generation rejects with, as fetch() does. */
export function abortError(): DOMException {
  return new DOMException("The operation was aborted.", "AbortError");
}

export function throwIfAborted(signal: AbortSignal | undefined): void {
  if (signal?.aborted) throw abortError();
}

/** A controller that `signal` aborts too. By hand: AbortSignal.any is younger than WebAssembly's vectors. */
export function linkedAbort(signal: AbortSignal | undefined): {
  readonly signal: AbortSignal;
  /** Aborts, and lets go of `signal`. */
  readonly stop: () => void;
} {
  const controller = new AbortController();
  const stop = (): void => {
    signal?.removeEventListener("abort", stop);
    controller.abort();
  };
  if (signal?.aborted) stop();
  else signal?.addEventListener("abort", stop);
  return { signal: controller.signal, stop };
}

/** An error in a form that survives postMessage with its class. */
export interface ErrorRecord {
  readonly kind: "artifact" | "device" | "request" | "abort" | "internal";
  readonly message: string;
  readonly param: string | null;
  readonly stack: string | null;
}

export function toErrorRecord(error: unknown): ErrorRecord {
  const message = error instanceof Error ? error.message : String(error);
  const stack = error instanceof Error ? (error.stack ?? null) : null;
  if (error instanceof RequestError) return { kind: "request", message, param: error.param, stack };
  if (error instanceof ArtifactError) return { kind: "artifact", message, param: null, stack };
  if (error instanceof DeviceError) return { kind: "device", message, param: null, stack };
  if (error instanceof DOMException && error.name === "AbortError")
    return { kind: "abort", message, param: null, stack };
  return { kind: "internal", message, param: null, stack };
}

export function fromErrorRecord(record: ErrorRecord): Error {
  switch (record.kind) {
    case "artifact":
      return new ArtifactError(record.message);
    case "device":
      return new DeviceError(record.message);
    case "request":
      return new RequestError(record.message, record.param);
    case "abort":
      return abortError();
    case "internal":
      return new Error(record.message, { cause: record.stack });
  }
}
