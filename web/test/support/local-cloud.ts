/** A cloud on this machine: a real HTTP server on a free port; a subclass makes the answers. */

import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

export abstract class LocalCloud {
  url = "";
  connections = 0;
  readonly #server = createServer((request, response) => void this.serve(request, response));

  async start(): Promise<this> {
    this.#server.on("connection", () => {
      this.connections += 1;
    });
    await new Promise<void>((resolve) => this.#server.listen(0, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}/v1`;
    return this;
  }

  async stop(): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((resolve) => this.#server.close(resolve));
  }

  protected abstract serve(request: IncomingMessage, response: ServerResponse): Promise<void>;
}
