/**
 * The service worker: serves the page, its scripts and the artifact's small files when the server does not
 * answer. Online everything still comes from the server, so that a new build shows up at once. Weights are
 * stored elsewhere (OPFS). An address like localhost:8080 may belong to another server later: then this
 * worker unregisters itself.
 */

/** The page's files and a hash of them, inserted by scripts/page.mjs. */
declare const SHELL: {
  readonly version: string;
  readonly files: readonly string[];
  /** Files that are stored from their first use on. */
  readonly late: readonly string[];
};

/** The used part of the worker's global, whose types cannot be loaded together with those of the window. */
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
/** Weights, which the engine stores itself, of one or several models. */
const WEIGHTS = /^artifact\/(.+\/)?weights\//;
/** Cache that the page fills itself (offline.ts). */
const ARTIFACT_CACHE = "nearfar-artifact";
/** The text that identifies our index.html. */
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

/** Whether a request is for the page's own folder: never a cloud, never weights. */
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

/** Unregisters and deletes its caches where the server now shows another page at this address. */
async function leaveUnlessOurs(page: Response): Promise<void> {
  const home = new URL(page.url).pathname === new URL(worker.registration.scope).pathname;
  if (!home || !page.ok || (await page.text()).includes(MARK)) return;
  await worker.registration.unregister();
  for (const name of await caches.keys())
    if (name.startsWith(PREFIX) || name === ARTIFACT_CACHE) await caches.delete(name);
}
