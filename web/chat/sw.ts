/**
 * The service worker: the page, its scripts and the artifact's small files come from here when the server
 * does not answer. Online everything still comes from the server, so that a new build shows up at once.
 * Weights are kept elsewhere (OPFS). An address such as localhost:8080 may belong to another server tomorrow:
 * then this one takes its leave.
 */

/** The page's files and a hash of them, put in by scripts/page.mjs. */
declare const SHELL: {
  readonly version: string;
  readonly files: readonly string[];
  /** Kept from their first use on. */
  readonly late: readonly string[];
};

/** Parts of the worker's global, whose types cannot be loaded beside those of the window. */
interface Scope {
  readonly registration: { readonly scope: string; unregister(): Promise<boolean> };
  skipWaiting(): Promise<void>;
  readonly clients: { claim(): Promise<void> };
  addEventListener(type: "install" | "activate", listener: (event: LifeEvent) => void): void;
  addEventListener(type: "fetch", listener: (event: RequestEvent) => void): void;
}

interface LifeEvent {
  waitUntil(work: Promise<unknown>): void;
}

interface RequestEvent {
  readonly request: Request;
  respondWith(response: Promise<Response>): void;
  waitUntil(work: Promise<unknown>): void;
}

const worker = globalThis as unknown as Scope;
const PREFIX = "nearfar-page-";
const CACHE = PREFIX + SHELL.version;
/** The engine keeps these itself; of each of several models. */
const WEIGHTS = /^artifact\/(.+\/)?weights\//;
/** Kept by the page itself (offline.ts). */
const ARTIFACT_CACHE = "nearfar-artifact";
/** What index.html says of itself. */
const MARK = '<meta name="application-name" content="nearfar"';

worker.addEventListener("install", (event) => event.waitUntil(install()));
worker.addEventListener("activate", (event) => event.waitUntil(activate()));
worker.addEventListener("fetch", (event) => {
  if (isOurs(event.request)) event.respondWith(answer(event));
});

async function install(): Promise<void> {
  const cache = await caches.open(CACHE);
  await cache.addAll(SHELL.files.map((file) => new Request(file, { cache: "no-cache" })));
  await worker.skipWaiting();
}

async function activate(): Promise<void> {
  for (const name of await caches.keys())
    if (name.startsWith(PREFIX) && name !== CACHE) await caches.delete(name);
  await worker.clients.claim();
}

/** Only what is read from the page's own folder; never a cloud, never weights. */
function isOurs({ method, url }: Request): boolean {
  const { scope } = worker.registration;
  return method === "GET" && url.startsWith(scope) && !WEIGHTS.test(url.slice(scope.length));
}

async function answer(event: RequestEvent): Promise<Response> {
  const { request } = event;
  try {
    const response = await fetch(request);
    if (request.mode === "navigate") event.waitUntil(leaveUnlessOurs(response.clone()));
    if (response.ok && SHELL.late.includes(request.url.slice(worker.registration.scope.length)))
      event.waitUntil(keep(request, response.clone()));
    return response;
  } catch (error) {
    for (const name of [CACHE, ARTIFACT_CACHE]) {
      // A link's parameters are for the page, not for the server.
      const kept = await caches.match(request, { cacheName: name, ignoreSearch: true });
      if (kept) return kept;
    }
    throw error;
  }
}

async function keep(request: Request, response: Response): Promise<void> {
  await (await caches.open(CACHE)).put(request, response);
}

/** Gives up the address and what was kept for it where the server now shows another page there. */
async function leaveUnlessOurs(page: Response): Promise<void> {
  const home = new URL(page.url).pathname === new URL(worker.registration.scope).pathname;
  if (!home || !page.ok || (await page.text()).includes(MARK)) return;
  await worker.registration.unregister();
  for (const name of await caches.keys())
    if (name.startsWith(PREFIX) || name === ARTIFACT_CACHE) await caches.delete(name);
}
