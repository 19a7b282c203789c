/**
 * nearfar behind OpenAI's HTTP interface without a server: a `fetch` for clients that take one, such as the
 * official `openai` package.
 */

import { type Answerer, ask, type Endpoint } from "../protocol/answerer.js";
import { streamOf } from "../protocol/streams.js";
import { eventsOf } from "./events.js";
import { problemOf } from "./problem.js";

export type { Answerer, Endpoint } from "../protocol/answerer.js";
export type {
  ItemParam,
  OutputItem,
  ResponseEvent,
  ResponseRecord,
  ResponseRequest,
  Responses,
  WholeResponse,
} from "../responses/types.js";

/** The type of `fetch` that clients take. */
export type Fetch = (input: string | URL | Request, init?: RequestInit) => Promise<Response>;

/**
 * A `fetch` that `engine` answers, whatever the host: POST …/chat/completions and …/completions, whole or as
 * server-sent events, POST …/responses, POST …/embeddings, GET …/models and …/models/NAME. Other addresses give 404; nothing is
 * sent over the network.
 *
 * It rejects only if the request's signal aborts, with the signal's reason; errors are responses of OpenAI's
 * shape that tell clients not to repeat the request.
 */
export function engineFetch(engine: Answerer): Fetch {
  return async (input, init) => {
    const request = new Request(input, init);
    try {
      return await answer(engine, request);
    } catch (error) {
      request.signal.throwIfAborted();
      return problemOf(error).response();
    }
  };
}

async function answer(engine: Answerer, request: Request): Promise<Response> {
  const { pathname } = new URL(request.url);
  const route = `${request.method} ${pathname}`;
  if (/^POST .*\/chat\/completions$/.test(route)) return create(engine.chat.completions, request);
  if (engine.completions && /^POST .*\/completions$/.test(route)) return create(engine.completions, request);
  if (engine.responses && /^POST .*\/responses$/.test(route)) return create(engine.responses, request, true);
  if (engine.embeddings && /^POST .*\/embeddings$/.test(route)) return create(engine.embeddings, request);
  const listed = engine.model
    ? [{ id: engine.model.name, object: "model", created: 0, owned_by: "nearfar" }]
    : [];
  if (/^GET .*\/models$/.test(route)) return Response.json({ object: "list", data: listed });
  const wanted = /^GET .*\/models\/(.+)$/.exec(route)?.[1];
  const found = listed.find(({ id }) => wanted && id === decodeURIComponent(wanted));
  if (found) return Response.json(found);
  const known = `chat/completions, ${engine.responses ? "responses, " : ""}${engine.completions ? "completions, " : ""}${engine.embeddings ? "embeddings, " : ""}models`;
  const message = wanted
    ? `model "${decodeURIComponent(wanted)}" is not loaded here. List those that are with GET …/models.`
    : `${route} is not answered on this device, which has ${known}.`;
  return problemOf({ message, code: wanted ? "model_not_found" : "not_found" }, 404).response();
}

async function create(endpoint: Endpoint, request: Request, named = false): Promise<Response> {
  const asked = await bodyOf(request);
  const answer = await ask(endpoint, { ...asked, signal: request.signal });
  if (asked.stream !== true) return Response.json(answer);
  return new Response(streamOf(eventsOf(answer as AsyncIterable<unknown>, request.signal, named)), {
    headers: { "content-type": "text/event-stream", "cache-control": "no-cache" },
  });
}

/** The request's JSON, without a `signal` field. */
async function bodyOf(request: Request): Promise<{ readonly stream?: unknown }> {
  const text = await request.text();
  let asked: unknown;
  try {
    asked = JSON.parse(text);
  } catch (error) {
    throw refused(`the body is not JSON: ${error instanceof Error ? error.message : error}`);
  }
  if (typeof asked !== "object" || asked === null || Array.isArray(asked))
    throw refused(`the body must be a JSON object, not ${text.slice(0, 80)}`);
  if ("signal" in asked) throw refused("unknown parameter signal", "signal");
  return asked;
}

/**
 * An error with the name and fields of a RequestError, because another entry may have its own copy of the
 * class.
 */
function refused(message: string, param: string | null = null): Error {
  return Object.assign(new Error(message), { name: "RequestError", param });
}
