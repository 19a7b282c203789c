"""Prometheus metrics: vLLM's names with the prefix `nearfar:`, so that its dashboards work after a change of
prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearfar.fallback_server.backend import BackendStats
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.prices import Price, price_of

PREFIX = "nearfar:"
UNKNOWN = "unknown"
"""The label of requests that were rejected before their model was known."""

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request to its first token.", _FIRST),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", _BETWEEN),
    "e2e_request_latency_seconds": ("From the request to its end.", _WHOLE),
    "request_queue_time_seconds": ("From the submission of a request to its first step.", _WHOLE),
    "request_prefill_time_seconds": ("From the first step of a request to its first token.", _WHOLE),
    "request_decode_time_seconds": ("From the first token of a request to its last.", _WHOLE),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of all answers of a request.", _TOKENS),
}


class CallMetrics:
    """The metrics of one model's requests. A call holds this object: looking up a label costs as much as
    counting a value, and would otherwise happen for each token.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        def of(name: str) -> Histogram:
            made: Histogram = metrics.histograms[name].labels(model)
            return made

        self.first_token = of("time_to_first_token_seconds")
        self.between = of("inter_token_latency_seconds")
        self.whole = of("e2e_request_latency_seconds")
        self.prompt_length = of("request_prompt_tokens")
        self.answer_length = of("request_generation_tokens")
        self.queued = of("request_queue_time_seconds")
        self.prefill = of("request_prefill_time_seconds")
        self.decode = of("request_decode_time_seconds")
        self._metrics, self._model = metrics, model

    def finished(self, reason: str) -> None:
        """Count an answer that has ended."""
        self._metrics.answers.labels(self._model, reason).inc()

    def outcome(self, outcome: str) -> None:
        """Count a request that has ended."""
        self._metrics.requests.labels(self._model, outcome).inc()

    def used(self, key: str, usage: TokenUsage, seconds: Mapping[str, float]) -> None:
        """Count the tokens, the seconds by phase, and the cost of a key's request."""
        metrics, names = self._metrics, (self._model, key)
        kinds = {"prompt": usage.prompt, "cached": usage.cached, "generation": usage.completion}
        for kind, tokens in kinds.items():
            metrics.key_tokens.labels(*names, kind).inc(tokens)
        for phase, took in seconds.items():
            metrics.key_seconds.labels(*names, phase).inc(took)
        metrics.cached.labels(self._model, metrics.source).inc(usage.cached)
        if (price := price_of(metrics.prices, self._model)) is not None:
            metrics.cost.labels(*names).inc(price.cost(usage))


class Metrics:
    """Metrics counted as requests pass, and the engine's figures at each scrape. All have the label
    model_name.

    `models` is called at each scrape, because models may appear after the start. Requests are counted under
    the model that answers. The engine's own figures are those of each model where the engine tells them
    apart; else they are under the name of the first model, since the others are further names of it.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[str]],
        stats: Callable[[], BackendStats],
        prices: Mapping[str, Price] | None = None,
        source: str = "prefix_cache",
    ) -> None:
        """`prices`: by model. `source`: where prompt tokens that were not computed come from: the engine's
        own "prefix_cache", or an "upstream" server's.
        """
        self.prices, self.source = prices or {}, source
        self._registry = CollectorRegistry()
        self._models = models
        self._calls: dict[str, CallMetrics] = {}
        self.histograms = {
            name: Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.answers = Counter(
            PREFIX + "request_success",
            "Answers by how they ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.requests = Counter(
            PREFIX + "requests",
            "Requests by outcome: ok, refused, limited, aborted, failed.",
            ["model_name", "outcome"],
            registry=self._registry,
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ["model_name", *labels], registry=self._registry)

        self.key_tokens = counter(
            "key_tokens",
            "Tokens by key: tokens of prompts, cached tokens of prompts, and generated tokens.",
            "key",
            "kind",
        )
        self.key_seconds = counter(
            "key_seconds", "Seconds of requests by key and phase: queue, prefill, decode.", "key", "phase"
        )
        self.cached = counter(
            "cached_tokens", "Prompt tokens that were not computed, by where they were found.", "source"
        )
        self.cost = counter("cost", "Cost of tokens at the prices of --price.", "key")
        self._registry.register(_EngineCollector(models, stats))
        for model in models():  # the label exists before there is a value
            self.of(model)

    def of(self, model: str) -> CallMetrics:
        """Return the metrics of a model that is served."""
        if (found := self._calls.get(model)) is None:
            found = self._calls[model] = CallMetrics(self, model)
        return found

    def unanswered(self, outcome: str, requested: str = "") -> None:
        """Count a request that ended before a model was chosen for it: under the requested name, else under
        the only model, else under UNKNOWN.
        """
        models = self._models()
        name = requested or (models[0] if len(models) == 1 else UNKNOWN)
        self.requests.labels(name, outcome).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


Figure = Callable[[BackendStats], float]
_GAUGES: dict[str, tuple[str, Figure]] = {
    "num_requests_running": ("Requests that the engine computes.", lambda stats: stats.running),
    "num_requests_waiting": ("Requests that wait for the engine.", lambda stats: stats.waiting),
    "kv_cache_usage_perc": ("Part of the KV cache in use; 1 is all.", lambda stats: stats.cache_usage),
}
_COUNTERS: dict[str, tuple[str, Figure]] = {
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.prefix_hits),
    "prefix_cache_queries": (
        "Prompt tokens looked for in the prefix cache.", lambda stats: stats.prefix_queries
    ),
    "num_preemptions": (
        "Requests that gave up their pages and were computed again.", lambda stats: stats.preemptions
    ),
    "prompt_tokens": ("Prompt tokens.", lambda stats: stats.prompt_tokens),
    "generation_tokens": ("Generated tokens.", lambda stats: stats.generated_tokens),
    "engine_steps": ("Steps of the engine.", lambda stats: stats.steps),
    "engine_restarts": ("Times that the engine's process was started again.", lambda stats: stats.restarts),
}  # fmt: skip


class _EngineCollector(Collector):
    """Reads the engine's figures at each scrape."""

    def __init__(self, models: Callable[[], Sequence[str]], stats: Callable[[], BackendStats]) -> None:
        self._models, self._stats = models, stats

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's figures by model; none while the engine has no model."""
        stats = self._stats()
        by_model = stats.by_model or {name: stats for name in self._models()[:1]}
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, figure) in table.items():
                family = kind(PREFIX + name, text, labels=["model_name"])
                for model, figures in by_model.items():
                    family.add_metric([model], figure(figures))
                yield family
        for model, figures in by_model.items():  # at most one is on a device of this machine
            yield from _device(model, figures)


def _device(model: str, stats: BackendStats) -> Iterator[Metric]:
    """Yield the figures of a model's device and program, where they are known."""

    def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
        made = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
        made.add_metric([model, *labels.values()], value)
        return made

    if stats.memory:
        yield gauge(
            "device_memory_bytes",
            "Bytes of the device's memory in use, by weights, KV cache and workspaces.",
            stats.memory,
        )
    if (program := stats.program) is not None:
        yield gauge(
            "largest_step_rows",
            "Rows of the largest step in use; fewer than the program has if memory did not suffice.",
            program.largest_step,
        )
        yield gauge(
            "largest_built_step_rows",
            "Rows of the largest step that the program was built for.",
            program.largest_bucket,
        )
        yield gauge(
            "program_info", "The artifact's program that runs, and why that; 1.", 1,
            device=program.device, program=program.name, why=program.why,
        )  # fmt: skip
