import { show } from "../artifact/json.js";
import { addressOf } from "../artifact/places.js";
import { BACKENDS, type BackendName } from "../protocol/backends.js";
import { ArtifactError, throwIfAborted } from "../protocol/errors.js";
import { fetchText } from "../storage/http.js";

/** A model of a list, as a picker shows it. */
export interface ListedModel {
  readonly name: string;
  /** The model's address, for createEngine and isSupported. */
  readonly url: URL;
  /** Bytes of the first load. */
  readonly bytes: number;
  readonly needs: {
    /** The backends for which the model is built. */
    readonly backends: readonly BackendName[];
    /** Bytes that the model takes on the device; null if the list does not say. */
    readonly memory: number | null;
  };
  readonly contextLength: number | null;
  readonly license: string | null;
  readonly description: string | null;
}

/** An object of a list's file, before it is checked. */
type Raw = Readonly<Record<string, unknown>>;

const MODEL = ["name", "model", "bytes", "needs", "contextLength", "license", "description"];
const NEEDS = ["backends", "memory"];

/**
 * Reads a list of models from a JSON file: `{ "models": [{ "name", "model", "bytes", "needs": { "backends",
 * "memory" }, "contextLength", "license", "description" }] }`; the first three fields are required. `model`
 * is an address as createEngine takes it, or an address relative to the file.
 *
 * @throws ArtifactError if the file is missing or invalid, or the reason of `signal`.
 */
export async function readModels(
  file: string | URL,
  { signal }: { readonly signal?: AbortSignal } = {},
): Promise<readonly ListedModel[]> {
  throwIfAborted(signal);
  const at = new URL(file, globalThis.location?.href);
  const text = await fetchText(at, null, { signal, cache: "no-cache" });
  const { models } = known(parsed(text, at), ["models"], at.href);
  if (!Array.isArray(models)) throw wrong(`${at.href}: models`, "a list", models);
  return models.map((model: unknown, i) => listed(model, `${at.href}: models[${i}]`, at));
}

function listed(value: unknown, where: string, at: URL): ListedModel {
  const model = known(value, MODEL, where);
  const needs = known(model.needs ?? {}, NEEDS, `${where}.needs`);
  const { backends = BACKENDS } = needs;
  if (!Array.isArray(backends) || backends.length === 0 || !backends.every((name) => BACKENDS.includes(name)))
    throw wrong(`${where}.needs.backends`, `a list of ${BACKENDS.join(" and ")}`, backends);
  const address = text(model.model, `${where}.model`);
  return {
    name: text(model.name, `${where}.name`),
    url: addressOf(address, at),
    bytes: count(model.bytes, `${where}.bytes`),
    needs: { backends, memory: maybe(needs.memory, count, `${where}.needs.memory`) },
    contextLength: maybe(model.contextLength, count, `${where}.contextLength`),
    license: maybe(model.license, text, `${where}.license`),
    description: maybe(model.description, text, `${where}.description`),
  };
}

function parsed(content: string, at: URL): unknown {
  try {
    return JSON.parse(content);
  } catch (cause) {
    throw new ArtifactError(
      `${at.href} is not JSON, so it is not a list of models: correct the address or the file.`,
      {
        cause,
        code: "not-an-artifact",
      },
    );
  }
}

/** An object that has no other fields. */
function known(value: unknown, fields: readonly string[], where: string): Raw {
  if (typeof value !== "object" || value === null || Array.isArray(value))
    throw wrong(where, "an object", value);
  const other = Object.keys(value).find((field) => !fields.includes(field));
  if (other !== undefined) throw wrong(where, `an object of ${fields.join(", ")}`, { [other]: "…" });
  return value as Raw;
}

function maybe<T>(value: unknown, read: (value: unknown, where: string) => T, where: string): T | null {
  return value === undefined || value === null ? null : read(value, where);
}

function text(value: unknown, where: string): string {
  if (typeof value !== "string" || value === "") throw wrong(where, "a text", value);
  return value;
}

function count(value: unknown, where: string): number {
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 1)
    throw wrong(where, "an integer above 0", value);
  return value;
}

function wrong(where: string, expected: string, value: unknown): ArtifactError {
  return new ArtifactError(`${where} should be ${expected}, but is ${show(value)}. Correct the list.`);
}
