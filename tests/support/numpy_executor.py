"""The reference executor: docs/artifact.md in NumPy float32, straight from a Hugging Face checkpoint.

The code is written for reading, not for speed; other executors are compared with it. step_reference.py reads
the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.executors.planned import check_pages, put
from nearfar.format.buffers import of_cache, page_table
from nearfar.format.sampler import BOUND, COLDEST
from nearfar.step.reading import read_model
from tests.support.step_reference import StepReference

Array = npt.NDArray[Any]
Weights = dict[str, Array]


class NumpyExecutor:
    """Runs step, greedy, sample and logprobs over named buffers, as an executor does; all work is done in
    `run`.
    """

    name = "numpy"
    precision = program_name = "f32"

    def __init__(
        self, config: dict[str, Any], weights: Weights, *, pages: int | Sequence[int], page_size: int = 16,
        slots: int = 16,
    ) -> None:  # fmt: skip
        """`pages`: the number of pages of each group, or one number for all."""
        model = read_model(config).model
        self.reference, self.page_size = StepReference(model, weights), page_size
        vocab, context = model.vocab_size, model.context_length
        self.looks, self.every = model.step.groups, model.step.caches
        self.groups = [model.step.group(cache) for cache in range(len(model.step.caches))]
        counts = [pages] * len(self.looks) if isinstance(pages, int) else pages
        self.kv = [
            tuple(
                np.zeros(
                    (counts[group], cache.kv_heads, cache.depth or page_size, cache.head_dim), np.float32
                )
                for _ in of_cache(0, cache.parts)
            )
            for cache, group in zip(model.step.caches, self.groups, strict=True)
        ]
        self.buffers: dict[str, Array] = {
            "tokens": np.zeros(256, np.int32),
            "positions": np.zeros(256, np.int32),
            "slots": np.zeros(256, np.int32),
            "logit_rows": np.zeros(16, np.int32),
            "logits": np.zeros((16, vocab), np.float32),
            "sampled": np.zeros(16, np.int32),
            "sample_f32": np.zeros((16, 8), np.float32),
            "sample_i32": np.zeros((16, 8), np.int32),
            "logit_bias": np.zeros((slots, vocab), np.float32),
            "counts": np.zeros((slots, vocab), np.int32),
            "allowed": np.zeros((slots, (vocab + 31) // 32), np.uint32),
            "logprob": np.zeros(16, np.float32),
            "top_ids": np.zeros((16, 20), np.int32),
            "top_logprobs": np.zeros((16, 20), np.float32),
        }
        for group in range(len(self.looks)):
            self.buffers[page_table(group)] = np.full((slots, -(-context // page_size)), -1, np.int32)
        self.steps: list[int] = []
        self.closed = False

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        put(self.buffers[buffer], buffer, data, row, column)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        snapshot = self.buffers[buffer][:rows].copy()
        return lambda: snapshot

    def caches(self, group: int) -> dict[str, Array]:
        """The content of a group's caches, by name."""
        own = (index for index, of in enumerate(self.groups) if of == group)
        return {
            name: part
            for index in own
            for name, part in zip(of_cache(index, self.every[index].parts), self.kv[index], strict=True)
        }

    def copy_page(self, group: int, source: int, target: int) -> None:
        for cache in self.caches(group).values():
            cache[target] = cache[source]

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        return {name: cache[list(pages)] for name, cache in self.caches(group).items()}

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        caches = self.caches(group)
        check_pages(
            content, {name: ((len(pages), *cache.shape[1:]), cache.dtype) for name, cache in caches.items()}
        )
        for name, cache in caches.items():
            cache[list(pages)] = content[name]

    def memory_used(self) -> int:
        return sum(part.nbytes for parts in self.kv for part in parts)

    def close(self) -> None:
        self.closed = True

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        return ()

    def run(self, function: str, size: int) -> None:
        getattr(self, f"_{function}")(size)

    def _step(self, size: int) -> None:
        self.steps.append(size)
        b, rows = self.buffers, min(size, 16)
        b["logits"][:rows] = self.reference.run(
            b["tokens"][:size], b["positions"][:size], self, b["logit_rows"][:rows]
        )

    def append(self, cache: int, *parts: Array) -> None:
        """See tests.support.step_reference.Memory: write to the pages of each row's sequence."""
        for m in np.flatnonzero(self.buffers["positions"][: len(parts[0])] >= 0):
            column, place = divmod(int(self.buffers["positions"][m]), self.page_size)
            number = self._page(cache, m, column)
            for kept, part in zip(self.kv[cache], parts, strict=True):
                kept[number, :, place] = part[m]

    def _page(self, cache: int, row: int, column: int) -> int:
        number = int(self.buffers[page_table(self.groups[cache])][self.buffers["slots"][row], column])
        assert number >= 0, "a row has no page"
        return number

    def state(self, cache: int, row: int) -> Array | None:
        position, stride = int(self.buffers["positions"][row]), self.looks[self.groups[cache]].stride
        assert stride is not None
        if position == 0:
            return None
        return self.kv[cache][0][self._page(cache, row, (position - 1) // stride)].copy()

    def keep(self, cache: int, row: int, state: Array) -> None:
        position, stride = int(self.buffers["positions"][row]), self.looks[self.groups[cache]].stride
        assert stride is not None
        self.kv[cache][0][self._page(cache, row, position // stride)] = state

    def seen(self, cache: int, row: int) -> tuple[Array, ...]:
        """See tests.support.step_reference.Memory: read the pages of the row's sequence up to its position,
        or the part of them in the window.
        """
        n, size, group = int(self.buffers["positions"][row]) + 1, self.page_size, self.groups[cache]
        first = max(n - (self.looks[group].window or n), 0)
        pages = self.buffers[page_table(group)][self.buffers["slots"][row], first // size : -(-n // size)]
        assert (pages >= 0).all(), "a row reads what has no page"
        read = slice(first % size, n - first // size * size)
        return tuple(
            c[pages].swapaxes(1, 2).reshape(-1, c.shape[1], c.shape[3])[read] for c in self.kv[cache]
        )

    def _take(self, row: int, token: int) -> None:
        self.buffers["sampled"][row] = token
        feed = self.buffers["sample_i32"][row, 5]
        if feed >= 0:
            self.buffers["tokens"][feed] = max(token, 0)

    def _greedy(self, rows: int) -> None:
        for row in np.flatnonzero(self.buffers["sample_i32"][:rows, 0] >= 0).tolist():
            self._take(row, best_finite(self.buffers["logits"][row]))

    def _sample(self, rows: int) -> None:
        b = self.buffers
        for row in range(rows):
            slot = b["sample_i32"][row, 0]
            if slot >= 0:
                token = sample_row(
                    b["logits"][row],
                    b["logit_bias"][slot],
                    b["allowed"][slot],
                    b["counts"][slot],
                    b["sample_f32"][row],
                    b["sample_i32"][row],
                )
                if token >= 0:
                    b["counts"][slot, token] += 1
                self._take(row, token)

    def _logprobs(self, rows: int) -> None:
        b = self.buffers
        for row in range(rows):
            logits = b["logits"][row].astype(np.float64)
            values = logits - logits.max()
            values = (values - np.log(np.exp(values).sum())).astype(np.float32)
            order = np.argsort(-values, kind="stable")[:20]
            b["logprob"][row] = values[max(b["sampled"][row], 0)]
            b["top_ids"][row, : len(order)], b["top_logprobs"][row, : len(order)] = order, values[order]


def best_finite(score: Array) -> int:
    """The lowest index of the largest finite value; -1 where there is none."""
    known = np.where(np.isfinite(score), score, -np.inf)
    best = int(np.argmax(known))
    return best if known[best] > -np.inf else -1


def sample_row(logits: Array, bias: Array, allowed: Array, counts: Array, floats: Array, ints: Array) -> int:
    """Steps 1 to 9 of "sample" in docs/artifact.md for one row."""
    temperature, top_p, min_p, repetition, presence, frequency = (np.float32(f) for f in floats[:6])
    top_k, seed_low, seed_high, counter = (int(i) for i in ints[1:5])
    tokens = np.arange(len(logits), dtype=np.uint32)
    score = logits + bias
    score[(allowed[tokens // 32] >> (tokens % 32)) & 1 == 0] = -np.inf
    seen, generated = counts != 0, (counts & 0xFFFFFF).astype(np.float32)
    score = np.where(seen, np.where(score > 0, score / repetition, score * repetition), score)
    score = score - frequency * generated - presence * (generated > 0)
    if temperature == 0 or best_finite(score) < 0:
        return best_finite(score)
    with np.errstate(over="ignore"):
        quotient = np.clip(
            score / max(temperature, np.float32(COLDEST)), np.float32(-BOUND), np.float32(BOUND)
        )
    score = np.where(np.isfinite(score), quotient, -np.inf).astype(np.float32)
    kept = np.isfinite(score)
    if 0 < top_k < len(score):
        kept &= score >= np.sort(score)[-top_k]
    top = score.max()
    if top_p < 1:
        values = np.sort(score[kept])[::-1]
        mass = np.cumsum(np.exp(values - top), dtype=np.float64)
        kept &= score >= values[int(np.argmax(mass >= top_p * mass[-1]))]
    if min_p > 0:
        kept &= score - top >= np.log(min_p)
    noise = gumbel(seed_low & 0xFFFFFFFF, seed_high & 0xFFFFFFFF, counter, tokens)
    return int(np.argmax(np.where(kept, score + noise, -np.inf)))


def gumbel(seed_low: int, seed_high: int, counter: int, tokens: Array) -> Array:
    """The noise of each token: pcg4d of (seed, counter, token)."""
    v = [np.full_like(tokens, word) for word in (seed_low, seed_high, counter)] + [tokens.copy()]
    v = [word * np.uint32(1664525) + np.uint32(1013904223) for word in v]
    for last in (False, True):
        v[0] += v[1] * v[3]
        v[1] += v[2] * v[0]
        v[2] += v[0] * v[1]
        v[3] += v[1] * v[2]
        if not last:
            v = [word ^ (word >> np.uint32(16)) for word in v]
    u = np.minimum(((v[0] >> np.uint32(8)) + 0.5) * 2.0**-24, 1 - 2.0**-24)
    return (-np.log(-np.log(u))).astype(np.float32)
