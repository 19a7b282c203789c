import { RequestError } from "../protocol/errors.js";

/** The server of models with `hf:` addresses. */
export const HUB = "https://huggingface.co/";

/**
 * The address of a model's folder, with a slash at the end. `model` is a URL, relative to the page if it is
 * not absolute, or "hf:OWNER/NAME[@REVISION][/FOLDER]", a model of the Hugging Face Hub (on its branch main
 * by default). `hub` is another server with the Hub's addresses, such as a mirror. All functions that take a
 * model's address accept these forms.
 */
export function modelUrl(model: string | URL, hub: string | URL = HUB): URL {
  return addressOf(model, globalThis.location?.href, hub);
}

/** The address of a model; `model` may be relative to `from`. */
export function addressOf(model: string | URL, from: string | URL | undefined, hub: string | URL = HUB): URL {
  if (!(model instanceof URL) && (typeof model !== "string" || model === ""))
    throw new RequestError(
      `The address of the model is ${model === "" ? "empty" : `${JSON.stringify(model)}`}: give the folder that holds its manifest.json.`,
      "url",
    );
  if (typeof model !== "string" || !/^hf:/i.test(model)) return folderAt(parsed(model, from));
  const named = /^hf:([\w.-]+)\/([\w.-]+)(?:@([\w.-]+))?((?:\/[\w.-]+)*)\/?$/i.exec(model);
  const [, owner = "", name = "", revision = "main", folder = ""] = named ?? [];
  const parts = [owner, name, revision, ...folder.split("/").slice(1)];
  if (!named || parts.some((part) => /^\.*$/.test(part)))
    throw new RequestError(
      `${model} is not a model of the Hub: it must be hf:OWNER/NAME[@REVISION][/FOLDER].`,
      "url",
    );
  const base = new URL(hub, globalThis.location?.href).href.replace(/\/?$/, "/");
  return new URL(`${owner}/${name}/resolve/${revision}${folder}/`, base);
}

function parsed(model: string | URL, from: string | URL | undefined): URL {
  try {
    return new URL(model, from);
  } catch (cause) {
    throw new RequestError(
      `The address of the model is not a URL: ${model}. Give one such as https://host/models/sample/.`,
      "url",
      { cause },
    );
  }
}

function folderAt(url: URL): URL {
  if (url.search !== "")
    throw new RequestError(
      `The address of the model has a query (${url.search}), which its files would not get: give the folder ` +
        "that holds its manifest.json.",
      "url",
    );
  url.hash = "";
  if (!url.pathname.endsWith("/")) url.pathname += "/";
  return url;
}
