"""Requests to send, with arrival, lengths and the beginnings that they share: from trace files, or drawn with
a seed.

Azure's format (AzurePublicDataset, LLM inference traces) is CSV with TIMESTAMP, ContextTokens,
GeneratedTokens. Mooncake's (kvcache-ai/Mooncake, FAST'25) is JSON lines with timestamp (ms), input_length,
output_length and hash_ids: equal ids are equal blocks of 512 prompt tokens.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from nearfar.errors import RequestError
from nearfar.fallback_server.bench.options import Workload

MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class Item:
    """A request of a trace.

    `at`: seconds after the first request. `blocks`: a number for each stretch of `block` prompt tokens; equal
    numbers mean equal text. Without blocks, the prompt shares nothing with others.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block: int = 0


def read_trace(path: Path) -> list[Item]:
    """Read all requests of a file, sorted by time, the first at 0. The suffix (.csv or .jsonl) determines the
    format. Raises RequestError for a file that cannot be read or is not a trace.
    """
    readers = {".csv": _azure, ".jsonl": _mooncake}
    if path.suffix not in readers:
        raise RequestError(f"{path}: a trace is .csv (Azure's format) or .jsonl (Mooncake's)", "trace")
    try:
        items = readers[path.suffix](path)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", "trace") from error
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path} is not a trace in {path.suffix} format: {error!r}", "trace") from error
    items = sorted(
        (item for item in items if item.prompt_tokens > 0 and item.output_tokens > 0), key=lambda i: i.at
    )
    if not items:
        raise RequestError(f"{path} holds no request", "trace")
    return [replace(item, at=item.at - items[0].at) for item in items]


def _azure(path: Path) -> list[Item]:
    def seconds(text: str) -> float:
        # Python's parser takes at most six digits of a second; the trace has seven.
        whole, _, part = text.partition(".")
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{part or 0}")

    with path.open(encoding="utf-8", newline="") as file:
        return [
            Item(seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]


def _mooncake(path: Path) -> list[Item]:
    items = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                row = json.loads(line)
                blocks = tuple(map(int, row.get("hash_ids", ())))
                length, answer = int(row["input_length"]), int(row["output_length"])
                items.append(Item(float(row["timestamp"]) / 1000, length, answer, blocks, MOONCAKE_BLOCK))
    return items


def synthetic(work: Workload, count: int) -> list[Item]:
    """Draw lengths from lognormal distributions with the wanted means, and arrivals from a Poisson process
    with one per second.
    """
    r = random.Random(f"lengths {work.seed}")

    def length(mean: int) -> int:
        # The mean of a lognormal is exp(mu + sigma²/2).
        return max(1, round(r.lognormvariate(math.log(mean) - work.spread**2 / 2, work.spread)))

    at, items = 0.0, []
    for _ in range(count):
        items.append(Item(at, length(work.prompt_tokens), length(work.output_tokens)))
        at += r.expovariate(1.0)
    return items


def sample(items: Sequence[Item], work: Workload, count: int) -> list[Item]:
    """Choose `count` items of a trace for closed loops, in their order; no item repeats before all have come
    once.
    """
    r = random.Random(f"sample {work.seed}")
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += sorted(r.sample(range(len(items)), min(count - len(chosen), len(items))))
    return [items[index] for index in chosen]


def window(items: Sequence[Item], work: Workload, count: int) -> list[Item]:
    """Choose `count` consecutive items for open loops, from a place drawn by the seed. The first arrives at
    0.
    """
    first = random.Random(f"window {work.seed}").randrange(max(1, len(items) - count + 1))
    chosen = items[first : first + count]
    return [replace(item, at=item.at - chosen[0].at) for item in chosen]


def at_rate(items: Sequence[Item], rate: float | None) -> list[Item]:
    """Stretch arrivals so that the mean rate is `rate` requests per second; bursts stay. With None they are
    unchanged.
    """
    span = items[-1].at
    if rate is None or span == 0:
        return list(items)
    factor = (len(items) - 1) / rate / span
    return [replace(item, at=item.at * factor) for item in items]


def fit(items: Sequence[Item], work: Workload, context: int | None, overhead: int) -> list[Item]:
    """Scale the lengths and limit them to the options and the model's context; a prompt has at least
    `overhead` + 1 tokens.
    """
    made = []
    for item in items:
        longest = min(work.max_prompt or math.inf, context * 3 // 4 if context else math.inf)
        prompt = max(overhead + 1, min(round(item.prompt_tokens * work.scale) + work.shared_prefix, longest))
        room = context - prompt - 1 if context else math.inf
        answer = max(1, min(round(item.output_tokens * work.scale), work.max_output or math.inf, room))
        block = max(1, round(item.block * work.scale)) if item.block else 0
        made.append(replace(item, prompt_tokens=int(prompt), output_tokens=int(answer), block=block))
    return made
