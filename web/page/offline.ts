/**
 * Makes the page work without its server: registers the service worker and keeps the artifact's small files.
 */

import type { Found } from "../src/both/artifacts.js";

const CACHE = "nearfar-artifact";

/** Keeps what the model's next start needs. Quietly: a browser that refuses just needs the server again. */
export async function keepForOffline(found: Found, program: string): Promise<void> {
  // Absent in insecure contexts and in some private windows.
  const { serviceWorker } = navigator as { readonly serviceWorker?: ServiceWorkerContainer };
  if (!serviceWorker) return;
  try {
    await serviceWorker.register("sw.js");
    await keepFiles([new URL("config.json", location.href), ...filesOf(found, program)]);
    await serviceWorker.ready;
    document.body.dataset.offline = "ready";
  } catch {
    // Nothing depends on it.
  }
}

/** All but the weights, of the one program that this device runs. */
function filesOf({ base, manifest }: Found, name: string): URL[] {
  const program = manifest.programs.find((candidate) => candidate.name === name);
  const library = program?.library ? [program.library] : [];
  const kernels = [...(program?.kernels.values() ?? []), ...library].map(({ file }) => file);
  const plans = Object.values(program?.functions ?? {}).flatMap((sizes) => sizes.map(({ plan }) => plan));
  const tokenizer = manifest.tokenizerFiles.map(({ file }) => file);
  return ["manifest.json", ...tokenizer, ...plans, ...kernels].map((file) => new URL(file, base));
}

async function keepFiles(urls: readonly URL[]): Promise<void> {
  const cache = await caches.open(CACHE);
  const wanted = new Set(urls.map(({ href }) => href));
  for (const request of await cache.keys()) if (!wanted.has(request.url)) await cache.delete(request);
  // The HTTP cache has them all: the server only confirms that they are still right.
  await cache.addAll([...wanted].map((url) => new Request(url, { cache: "no-cache" })));
}
