import { RequestError } from "./errors.js";

/** Where the models of `hf:` addresses are. */
export const HUB = "https://huggingface.co/";

/**
 * The address of a model: one that a URL can be made of, beside the page's; or "hf:OWNER/NAME[@REVISION]
 * [/FOLDER]", a model of the Hugging Face Hub, by default of its branch main. `hub`: another server with the
 * Hub's addresses, such as a mirror.
 */
export function modelUrl(model: string | URL, hub: string | URL = HUB): URL {
  if (!(model instanceof URL) && (typeof model !== "string" || model === ""))
    throw new RequestError(
      `The address of the model is ${model === "" ? "empty" : `${JSON.stringify(model)}`}: give the folder that holds its manifest.json.`,
      "url",
    );
  if (typeof model !== "string" || !/^hf:/i.test(model)) return new URL(model, globalThis.location?.href);
  const named = /^hf:([\w.-]+)\/([\w.-]+)(?:@([\w.-]+))?((?:\/[\w.-]+)*)\/?$/i.exec(model);
  const [, owner = "", name = "", revision = "main", folder = ""] = named ?? [];
  const parts = [owner, name, revision, ...folder.split("/").slice(1)];
  if (!named || parts.some((part) => /^\.*$/.test(part)))
    throw new RequestError(
      `${model} is no model of the Hub: it must be hf:OWNER/NAME[@REVISION][/FOLDER].`,
      "url",
    );
  const base = new URL(hub, globalThis.location?.href).href.replace(/\/?$/, "/");
  return new URL(`${owner}/${name}/resolve/${revision}${folder}/`, base);
}
