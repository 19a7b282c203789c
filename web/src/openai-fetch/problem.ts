/** Errors as OpenAI's clients expect them: message, type, param, code, and the HTTP status. */

export interface Problem {
  readonly status: number;
  readonly body: {
    readonly error: {
      readonly message: string;
      readonly type: "invalid_request_error" | "server_error";
      readonly param: string | null;
      readonly code: string | null;
    };
  };
  response(): Response;
}

/** The HTTP status by the name of the error's class, because entries have their own copies of the classes. */
const STATUS: Readonly<Record<string, number>> = {
  RequestError: 400,
  CloudError: 502,
  DeviceError: 503,
  RouteError: 503,
};

/** OpenAI's own codes, which clients know. */
const CODES: Readonly<Record<string, string>> = { "context-overflow": "context_length_exceeded" };

export function problemOf(error: unknown, known?: number): Problem {
  const { name, message, param, code } = Object(error) as Partial<Record<string, unknown>>;
  const unloaded = name === "RequestError" && param === "model";
  const status = known ?? (unloaded ? 404 : (STATUS[String(name)] ?? 500));
  const body = {
    error: {
      message: typeof message === "string" ? message : String(error),
      type: status < 500 ? "invalid_request_error" : "server_error",
      param: typeof param === "string" ? param : null,
      code: unloaded ? "model_not_found" : typeof code === "string" ? (CODES[code] ?? code) : null,
    },
  } as const;
  return {
    status,
    body,
    // The header stops clients from retrying, because the engine has already retried what helps.
    response: () => Response.json(body, { status, headers: { "x-should-retry": "false" } }),
  };
}
