"""The torch engine against transformers on a CPU: continuous batching, static padded batches, one by one.

    python benchmarks/server_engine.py [--models classics-7m qwen3-40m] [--requests 48] [--threads 2]
    [--rounds 3]
        [--scale 0.15] [--dtype float32] [--skip one-by-one] [--json FILE]

Prompt and answer lengths are those of real chat traffic (shared/data/traffic/azure-llm-2023), times
`--scale`, and all requests are there at once. All engines get the same prompts (random token ids), the same
number of tokens to make for each, the same weights, dtype and threads; only tokens that a request asked for
count. Each round measures one engine after the other. The table gives medians over the rounds, and the median
of the rounds' ratios. Then: time to the first token with a system prompt of 300 tokens that all requests
share.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nearfar.fallback_server.backend import Sampling, TokenRequest
from nearfar.fallback_server.torch_engine import TorchBackend, TorchOptions

DATA = Path(os.environ.get("NEARFAR_SHARED", Path(__file__).parents[2] / "shared" / "data"))
TRACE = DATA / "traffic" / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"
RUNNING = 16  # sequences at once, for every engine that batches
SYSTEM = 300  # tokens of the system prompt
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens to make."""

    tokens: tuple[int, ...]
    count: int


def jobs(vocab: int, context: int, requests: int, scale: float, seed: int = 0) -> list[Job]:
    """Requests with lengths drawn from the trace, cut to the context."""
    with TRACE.open() as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    r = random.Random(seed)
    made = []
    for prompt, answer in r.sample(rows, requests):
        length = max(4, min(int(prompt * scale), context * 3 // 4))
        count = max(2, min(int(answer * scale), context - length - 1))
        made.append(Job(tuple(r.randrange(10, vocab) for _ in range(length)), count))
    return made


def write_qwen3(path: Path) -> Path:
    """A Qwen3 of 41 million random parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


class Peer:
    """transformers over the same checkpoint."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model.eval()

    def _config(self, **options: Any) -> GenerationConfig:
        return GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=None, **options
        )

    def continuous(self, work: list[Job]) -> float:
        """Transformers' own continuous batching; seconds from the first request until the last answer is
        whole.
        """
        self.model.generation_config = self._config()
        longest = max(len(job.tokens) + job.count for job in work)
        page = 32  # smaller pages than its default of 256 suit short sequences
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=RUNNING * (-(-longest // page) + 1),
            max_batch_tokens=256,
            max_requests_per_batch=RUNNING,
        )
        with self.model.continuous_batching_context_manager(
            generation_config=self._config(max_new_tokens=64),
            continuous_batching_config=config,
            block=True,
            timeout=5,
        ) as manager:
            start = time.perf_counter()
            wanted = {manager.add_request(list(job.tokens), max_new_tokens=job.count): job for job in work}
            left = dict(wanted)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert len(result.generated_tokens) == left.pop(result.request_id).count
                assert result is not None or manager.is_running(), (
                    "transformers' continuous batching ended early"
                )
            seconds = time.perf_counter() - start
        self.model.set_attn_implementation("sdpa")
        return seconds

    def static(self, work: list[Job]) -> float:
        """Batches in order of arrival, padded on the left, each as long as its longest answer."""
        start = time.perf_counter()
        for first in range(0, len(work), RUNNING):
            batch = work[first : first + RUNNING]
            longest = max(len(job.tokens) for job in batch)
            ids = torch.tensor([[0] * (longest - len(job.tokens)) + list(job.tokens) for job in batch])
            mask = torch.tensor([[0] * (longest - len(job.tokens)) + [1] * len(job.tokens) for job in batch])
            count = max(job.count for job in batch)
            self.model.generate(
                ids, attention_mask=mask, generation_config=self._config(max_new_tokens=count)
            )
        return time.perf_counter() - start

    def one_by_one(self, work: list[Job]) -> float:
        """Generate for one request at a time."""
        start = time.perf_counter()
        for job in work:
            self.model.generate(
                torch.tensor([job.tokens]),
                attention_mask=torch.ones(1, len(job.tokens), dtype=torch.int64),
                generation_config=self._config(max_new_tokens=job.count),
            )
        return time.perf_counter() - start


async def ours(backend: TorchBackend, work: list[Job], name: str) -> float:
    """The torch engine in its process, all requests submitted at once."""

    async def one(index: int, job: Job) -> None:
        request = TokenRequest(f"{name}-{index}", job.tokens, job.count, GREEDY)
        assert sum([1 async for _ in backend.submit(request)]) == job.count

    start = time.perf_counter()
    await asyncio.gather(*(one(index, job) for index, job in enumerate(work)))
    return time.perf_counter() - start


async def first_tokens(
    backend: TorchBackend, vocab: int, shared: bool, requests: int = 16
) -> tuple[float, float]:
    """Median TTFT in seconds, one request after the other, and the part of prompt tokens found in the
    prefix cache.
    """
    r = random.Random(1 if shared else 2)
    system = tuple(r.randrange(10, vocab) for _ in range(SYSTEM))
    before, times = backend.stats(), []
    for index in range(requests):
        head = system if shared else tuple(r.randrange(10, vocab) for _ in range(SYSTEM))
        tokens = (*head, *(r.randrange(10, vocab) for _ in range(24)))
        start = time.perf_counter()
        async for _ in backend.submit(TokenRequest(f"ttft-{shared}-{index}", tokens, 1, GREEDY)):
            times.append(time.perf_counter() - start)
    after = backend.stats()
    hits, queries = after.prefix_hits - before.prefix_hits, after.prefix_queries - before.prefix_queries
    return statistics.median(times), hits / queries


async def compare(name: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare all engines on one model."""
    torch.set_num_threads(options.threads)
    peer = Peer(path, options.dtype)
    context = min(peer.model.config.max_position_embeddings, 1024)
    work = jobs(peer.model.config.vocab_size, context, options.requests, options.scale)
    tokens = sum(job.count for job in work)
    backend = await TorchBackend.load(
        path,
        TorchOptions(
            device="cpu", dtype=options.dtype, threads=options.threads, max_running=RUNNING, token_budget=256
        ),
    )
    theirs: dict[str, Callable[[list[Job]], float]] = {
        "continuous": peer.continuous,
        "static": peer.static,
        "one-by-one": peer.one_by_one,
    }
    seconds: dict[str, list[float]] = {key: [] for key in ("ours", *theirs) if key not in options.skip}
    await ours(backend, work[:4], "warm")
    for key, run in theirs.items():
        if key in seconds:
            run(work[:2])
    for round_ in range(options.rounds):
        # Each round has other prompts, so that none is in the prefix cache.
        work = jobs(peer.model.config.vocab_size, context, options.requests, options.scale, seed=round_)
        tokens = sum(job.count for job in work)
        for key in seconds:
            taken = await ours(backend, work, f"round{round_}") if key == "ours" else theirs[key](work)
            seconds[key].append(taken / tokens)
            print(f"  {name} round {round_} {key}: {tokens / taken:.1f} tokens/s", flush=True)
    shared, hit_rate = await first_tokens(backend, peer.model.config.vocab_size, True)
    alone, _ = await first_tokens(backend, peer.model.config.vocab_size, False)
    await backend.close()
    return {
        "model": name,
        "tokens_per_second": {key: 1 / statistics.median(values) for key, values in seconds.items()},
        "ours_over": {
            key: statistics.median(t / o for t, o in zip(values, seconds["ours"], strict=True))
            for key, values in seconds.items()
            if key != "ours"
        },
        "prefix": {"hit_rate": hit_rate, "ttft_ms_shared": shared * 1e3, "ttft_ms_unshared": alone * 1e3},
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["classics-7m", "qwen3-40m"])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            path = DATA / "models" / "classics-7M" if name == "classics-7m" else write_qwen3(Path(folder))
            results.append(asyncio.run(compare(name, path, options)))
    for result in results:
        print(
            f"\n{result['model']} ({options.dtype}, {options.threads} threads, {options.requests} "
            f"requests, {RUNNING} at once)"
        )
        for key, rate in result["tokens_per_second"].items():
            ratio = f"  ours is {result['ours_over'][key]:.2f}x" if key in result["ours_over"] else ""
            print(f"  {key:12s} {rate:8.1f} tokens/s{ratio}")
        prefix = result["prefix"]
        print(
            f"  {SYSTEM}-token system prompt: {prefix['hit_rate']:.0%} of prompt tokens found, TTFT "
            f"{prefix['ttft_ms_shared']:.1f} ms (without sharing {prefix['ttft_ms_unshared']:.1f} ms)"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "results": results}, indent=2)
        )


if __name__ == "__main__":
    main()
