/**
 * One run of one runtime: load, answer a prompt, measure. Times in milliseconds, as a person at the page sees them.
 * What is loaded stays until the tab is closed, so that its memory can be looked at.
 */

/** Reads a stream of completion chunks: when the first text came, when the last, how many tokens. */
async function drain(started, chunks) {
  let first = 0;
  let last = 0;
  let pieces = 0;
  let text = "";
  let usage = null;
  for await (const chunk of chunks) {
    usage = chunk.usage ?? usage;
    if (!chunk.choices?.[0]?.text) continue;
    last = performance.now();
    first ||= last;
    text += chunk.choices[0].text;
    pieces++;
  }
  const tokens = usage?.completion_tokens ?? pieces;
  const decode = last > first ? ((tokens - 1) * 1000) / (last - first) : 0;
  const prompt_tokens = usage?.prompt_tokens ?? null;
  return { ttft_ms: first - started, decode_tokens_per_s: decode, tokens, prompt_tokens, text };
}

/** The time to the first token of a second turn: the first prompt, its answer, and new text. */
async function secondTurn(complete, request, { text, ttft_ms }) {
  const started = performance.now();
  const next = { ...request, prompt: `${request.prompt}${text} and then it went on`, max_tokens: 4 };
  const second = await drain(started, await complete(next));
  return { second_ttft_ms: second.ttft_ms, second_of_first: second.ttft_ms / ttft_ms };
}

export async function nearfar({ artifact, prompt, tokens, threads, second }) {
  const { createEngine } = await import("./nearfar/index.js");
  const began = performance.now();
  const engine = await createEngine(new URL(artifact, location.href), { threads });
  const load_ms = performance.now() - began;
  // The first use of each pipeline compiles it; wllama warms up while it loads, so this belongs to loading too.
  await engine.completions.create({ prompt: "warm up", max_tokens: 4, temperature: 0 });
  const ready_ms = performance.now() - began;
  const started = performance.now();
  const request = { prompt, max_tokens: tokens, temperature: 0, stream: true, stream_options: { include_usage: true } };
  const result = await drain(started, await engine.completions.create(request));
  const complete = (asked) => engine.completions.create(asked);
  const later = second ? await secondTurn(complete, request, result) : null;
  const stats = await engine.stats();
  const { adapter: device } = engine.model;
  return { load_ms, ready_ms, launches_per_token: stats.launchesPerToken, device, ...result, ...later };
}

export async function wllama({ model, prompt, tokens, threads, context, second }) {
  const { Wllama, LoggerWithoutDebug } = await import("./wllama/index.js");
  const began = performance.now();
  const runtime = new Wllama(
    { default: new URL("./wllama/wasm/wllama.wasm", location.href).href },
    { logger: LoggerWithoutDebug, suppressNativeLog: true },
  );
  await runtime.loadModelFromUrl(new URL(model, location.href).href, {
    n_ctx: context,
    n_threads: threads,
    n_gpu_layers: 0,
  });
  const load_ms = performance.now() - began;
  await drain(0, await runtime.createCompletion({ prompt: "warm up", max_tokens: 4, temperature: 0, stream: true }));
  const ready_ms = performance.now() - began;
  const started = performance.now();
  const request = { prompt, max_tokens: tokens, temperature: 0, stream: true, stream_options: { include_usage: true } };
  const result = await drain(started, await runtime.createCompletion(request));
  const complete = (asked) => runtime.createCompletion(asked);
  const later = second ? await secondTurn(complete, request, result) : null;
  const device = `WebAssembly, ${runtime.getNumThreads()} threads`;
  return { load_ms, ready_ms, launches_per_token: null, device, ...result, ...later };
}

export async function transformers({ artifact, prompt, tokens, threads }) {
  const { env, pipeline, BaseStreamer } = await import("./transformers/transformers.min.js");
  const began = performance.now();
  env.allowLocalModels = true;
  env.allowRemoteModels = false;
  const [, folder, name] = new URL(artifact, location.href).pathname.match(/^(.*\/)(.+)\/$/);
  env.localModelPath = folder;
  env.backends.onnx.wasm.wasmPaths = new URL("./onnxruntime/", location.href).href;
  env.backends.onnx.wasm.numThreads = threads;
  const { model, tokenizer } = await pipeline("text-generation", name, { device: "wasm" });
  const load_ms = performance.now() - began;
  /** Every token counts from when it is handed on; the first that is put are the prompt's. */
  class Clock extends BaseStreamer {
    times = [];
    put() {
      this.times.push(performance.now());
    }
    end() {}
  }
  const generate = async (text, count) => {
    const { input_ids, attention_mask } = tokenizer(text);
    const clock = new Clock();
    const asked = { max_new_tokens: count, min_new_tokens: count, do_sample: false, streamer: clock };
    await model.generate({ inputs: input_ids, attention_mask, ...asked });
    return { prompt_tokens: input_ids.dims[1], times: clock.times.slice(1) };
  };
  await generate("warm up", 4);
  const ready_ms = performance.now() - began;
  const started = performance.now();
  const { prompt_tokens, times } = await generate(prompt, tokens);
  const [first] = times;
  const decode_tokens_per_s = ((times.length - 1) * 1000) / (times.at(-1) - first);
  const measured = { ttft_ms: first - started, decode_tokens_per_s, tokens: times.length, prompt_tokens };
  const device = `WebAssembly, ${env.backends.onnx.wasm.numThreads} threads`;
  return { load_ms, ready_ms, launches_per_token: null, device, ...measured };
}
