import { createServer, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { extname } from "node:path";

const TYPES: Record<string, string> = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".json": "application/json",
};

export interface StaticServer {
  readonly url: URL;
  /** Paths asked for, in order. */
  readonly requests: string[];
  /** Answers a path in another way than from the files; returns whether it has answered. */
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
