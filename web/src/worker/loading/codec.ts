import type { Found } from "../../artifact/artifacts.js";
import { ArtifactError } from "../../protocol/errors.js";
import { openFiles } from "../store/bundle-files.js";
import type { KeptOptions } from "../store/kept-file.js";
import type { TextCodec } from "../text/types.js";
import type { Parts } from "./parts.js";

/** Loads the tokenizer and the chat template of an artifact, with the code for both. */
export async function loadCodec(
  { base, manifest }: Found,
  options: KeptOptions,
  { text }: Parts,
): Promise<TextCodec> {
  const small = openFiles(base, manifest, null, options);
  const read = async (name: string): Promise<string | null> => {
    const entry = manifest.tokenizerFiles.find(({ file }) => file.endsWith(`/${name}`));
    return entry ? new TextDecoder().decode(await (await small)(entry)) : null;
  };
  const [{ createTextCodec }, tokenizer, config, template, toolTemplate] = await Promise.all([
    text(),
    read("tokenizer.json"),
    read("tokenizer_config.json"),
    read("chat_template.jinja"),
    read("tool_use.jinja"),
  ]);
  if (tokenizer === null)
    throw new ArtifactError("The artifact has no tokenizer/tokenizer.json. Build it again.");
  const files = {
    tokenizerJson: JSON.parse(tokenizer) as unknown,
    tokenizerConfig: JSON.parse(config ?? "{}") as unknown,
    ...(template !== null && { chatTemplate: template }),
    ...(toolTemplate !== null && { toolTemplate }),
  };
  return createTextCodec(files, { ...manifest.model, answers: manifest.answers });
}
