/**
 * Makes the page work without its server: registers the service worker and stores what the page itself reads.
 * The engine stores the model's files.
 */

import type { Found } from "../src/artifact/artifacts.js";
import { MODELS } from "./offer.js";

const CACHE = "nearfar-artifact";

/** Stores what the page's next start needs. It fails silently: then the page just needs the server again. */
export async function keepForOffline({ base }: Found): Promise<void> {
  // Absent in insecure contexts and in some private windows.
  const { serviceWorker } = navigator as { readonly serviceWorker?: ServiceWorkerContainer };
  if (!serviceWorker) return;
  try {
    await serviceWorker.register("sw.js");
    const own = ["config.json", MODELS].map((file) => new URL(file, location.href));
    await keepFiles([...own, new URL("manifest.json", base)]);
    await serviceWorker.ready;
    document.body.dataset.offline = "ready";
  } catch {
    // Nothing depends on it.
  }
}

async function keepFiles(urls: readonly URL[]): Promise<void> {
  const cache = await caches.open(CACHE);
  const wanted = new Set(urls.map(({ href }) => href));
  for (const request of await cache.keys()) if (!wanted.has(request.url)) await cache.delete(request);
  // The files are in the HTTP cache: the server only confirms that they are still valid.
  await cache.addAll([...wanted].map((url) => new Request(url, { cache: "no-cache" })));
}
