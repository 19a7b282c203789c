import { createServer, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { extname, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { bundle, bundleHere } from "../../scripts/bundle.mjs";

const TYPES: Record<string, string> = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".json": "application/json",
};

export interface StaticServer {
  readonly url: URL;
  /** Paths asked for, in order. */
  readonly requests: string[];
  /** What answers a path otherwise than from the files; returns whether it has. */
  intercept: (path: string, response: ServerResponse) => boolean;
  close(): void;
}

/** Serves dist/, an empty page, and files from memory or a folder. */
export async function serve(lookUp: (path: string) => Promise<Uint8Array | null>): Promise<StaticServer> {
  const requests: string[] = [];
  const server = createServer(async (request, response) => {
    const path = new URL(request.url ?? "/", "http://x").pathname.slice(1);
    requests.push(path);
    if (self.intercept(path, response)) return;
    const content = path === "" ? new TextEncoder().encode("<!doctype html>") : await lookUp(path);
    if (!content) {
      response.writeHead(404).end();
      return;
    }
    response.setHeader("access-control-allow-origin", "*");
    response.setHeader(
      "content-type",
      TYPES[path === "" ? ".html" : extname(path)] ?? "application/octet-stream",
    );
    response.end(content);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const self: StaticServer = {
    url: new URL(`http://127.0.0.1:${(server.address() as AddressInfo).port}/`),
    requests,
    intercept: () => false,
    close: () => {
      server.closeAllConnections();
      server.close();
    },
  };
  return self;
}

const DIST = fileURLToPath(new URL("../../dist/", import.meta.url));
let built: Promise<Map<string, Uint8Array>> | null = null;

/**
 * The files of the package as they are now, by path under dist/; built in memory, so that nobody's dist/ is
 * touched.
 */
export function builtPackage(): Promise<Map<string, Uint8Array>> {
  built ??= Promise.all([bundle({ write: false }), bundleHere({ write: false })]).then((made) => {
    const files = made.flatMap(({ outputFiles }) => outputFiles);
    return new Map(files.map(({ path, contents }) => [relative(DIST, path), contents]));
  });
  return built;
}

/** A file of the built package, for paths under dist/. */
export async function distFile(path: string): Promise<Uint8Array | null> {
  if (!path.startsWith("dist/")) return null;
  return (await builtPackage()).get(path.slice("dist/".length)) ?? null;
}
