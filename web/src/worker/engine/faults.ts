import { DeviceError } from "../../protocol/errors.js";
import type { Request } from "./request.js";

/** Errors of steps. */

/** The device had no memory for steps of `size` rows. */
export class NoRoom extends Error {
  constructor(
    readonly size: number,
    readonly reason: DeviceError,
  ) {
    super(reason.message);
  }
}

/** Converts an error of the driver; afterwards nothing on the device can be relied on. */
export function deviceError(cause: unknown): DeviceError | NoRoom {
  if (cause instanceof DeviceError || cause instanceof NoRoom) return cause;
  const message = cause instanceof Error ? cause.message : String(cause);
  const advice = "Ask again: the device is reopened. If this happens again, load the model again.";
  return new DeviceError(`A step failed on the device: ${message}. ${advice}`, { cause });
}

export function notFinite({ tokens, prompt }: Request): DeviceError {
  return new DeviceError(
    `The model's logits were not finite (NaN or infinite) after ${tokens.length - prompt.length} tokens of ` +
      "the answer. Ask again. If this happens again, the model's values are too large for this device's " +
      "kernels, or the artifact is damaged: download or build it again, or use another model.",
  );
}

/** The error of a request that is too long for the reopened device. */
export function tooLong({ tokens }: Request, contextLength: number, before: number): DeviceError {
  return new DeviceError(
    `The device was reopened and has less room: a context of ${contextLength} tokens instead ` +
      `of ${before}. This request has ${tokens.length} tokens already. Shorten it, or close other tabs and ` +
      "load the model again.",
  );
}
