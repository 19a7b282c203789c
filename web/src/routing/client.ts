/** The hybrid client: OpenAI's interface over a device and a cloud. */

import { later } from "../protocol/errors.js";
import type { ResponseRequest, Responses } from "../responses/types.js";
import { HybridAnswer } from "./answer.js";
import { assemble } from "./assemble.js";
import type { CloudOptions } from "./cloud.js";
import type { DeviceEngine } from "./device.js";
import type { Chunk, Completion, HybridRequest } from "./openai.js";
import type { HybridOptions } from "./options.js";
import type { Policy, PolicyOptions } from "./policy.js";
import type { DecisionRecord } from "./records.js";
import { hintsOf } from "./request.js";
import { Router } from "./router.js";
import type { Scorer } from "./scorer.js";

/** Answers behind OpenAI's interface, on the device or in the cloud. */
export class HybridClient {
  readonly chat: { readonly completions: HybridCompletions };
  /** OpenAI's Responses API; each response is routed as a chat completion. */
  readonly responses = {
    create: async (request: ResponseRequest) =>
      (await later(() => import("../responses/index.js"), "nearfar/responses")).respond(this, request),
  } as Responses;
  readonly #router: Router;

  constructor(options: HybridOptions) {
    this.#router = new Router(options);
    this.chat = { completions: new HybridCompletions(this.#router) };
  }

  /** The device's engine; set it when it is loaded, or loaded again. */
  get device(): DeviceEngine | null {
    return this.#router.device;
  }

  set device(engine: DeviceEngine | null) {
    this.#router.device = engine;
  }

  /** Sets the scorer of later requests' difficulty. */
  setDifficulty(scorer: Scorer | null): void {
    this.#router.scorer = scorer;
  }

  /** Another cloud, or none. */
  setCloud(options: CloudOptions | null): void {
    this.#router.cloud = options;
  }

  get policy(): Policy {
    return this.#router.policy;
  }

  /** Replaces the policy. */
  setPolicy(options: PolicyOptions): void {
    this.#router.policy = options;
  }

  /** The latest decisions with their outcome. */
  get records(): readonly DecisionRecord[] {
    return this.#router.records.all;
  }

  /** The records as JSON lines. */
  exportRecords(): string {
    return this.#router.records.jsonLines();
  }
}

/** `chat.completions` of a {@link HybridClient}. */
export class HybridCompletions {
  constructor(private readonly router: Router) {}

  /**
   * Answers on the device or in the cloud, as the policy decides; `x_nearfar` of the answer says where and
   * why. With `stream: true` gives the chunks; leaving the loop over them ends the answer.
   *
   * @throws RouteError where no side may answer, RequestError, DeviceError or CloudError where the side that
   * should answer fails
   *     and no other may go on, or the reason of `signal` when that says so.
   */
  create(request: HybridRequest & { stream: true }): Promise<AsyncIterable<Chunk>>;
  create(request: HybridRequest & { stream?: false | null }): Promise<Completion>;
  create(request: HybridRequest): Promise<AsyncIterable<Chunk> | Completion>;
  async create(request: HybridRequest): Promise<AsyncIterable<Chunk> | Completion> {
    const asked = hintsOf(request);
    const plan = await this.router.plan(asked);
    const answer = new HybridAnswer(this.router, asked.request, plan);
    if (!request.stream) return assemble(answer);
    const chunks = answer.chunks();
    // Read the first chunk here, so that a request that cannot be answered rejects `create` and not the loop
    // over its chunks.
    const first = await chunks.next();
    if (first.done) return chunks;
    const stream = preceded(first.value, chunks);
    UNREAD.register(stream, answer);
    return stream;
  }
}

/**
 * Ends answers whose stream was garbage-collected, so that nobody can end them: their reservations are
 * released.
 */
const UNREAD = new FinalizationRegistry<HybridAnswer>((answer) => answer.abort());

async function* preceded(first: Chunk, rest: AsyncGenerator<Chunk>): AsyncGenerator<Chunk> {
  try {
    yield first;
    yield* rest;
  } finally {
    await rest.return(undefined);
  }
}
