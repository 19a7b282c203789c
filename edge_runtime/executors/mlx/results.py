"""Device state between steps in addition to the cache: logits, sampled tokens, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.rows import Array
from nearfar.edge_runtime.executors.mlx.sampling import SamplerRows, greedy, logprobs, sample
from nearfar.errors import ArtifactError
from nearfar.format.manifest import Manifest
from nearfar.format.sampler import SampleF32, SampleI32


class Results:
    """The buffers of docs/artifact.md that the device writes.

    Logits are computed on request, and only the requested rows: of the 16 rows that a step may return, a
    prompt needs one or none, and a row costs a pass over the largest matrix.
    """

    def __init__(self, manifest: Manifest, head: Callable[[mx.array], mx.array]) -> None:
        """`head` maps hidden states [M, hidden_size] to logits float32 [M, vocab_size], or to embeddings."""
        self._head = head
        self._end = "embedding" if manifest.model.task == "embed" else "logits"
        vocab, slots = manifest.model.vocab_size, manifest.cache.slots
        shapes = {buffer.name: buffer for buffer in manifest.buffers}
        self._kinds = {"int32": mx.int32, "float32": mx.float32}
        self._buffers = {
            name: mx.zeros([int(d) for d in shapes[name].shape], self._kinds[shapes[name].dtype])
            for name in ("tokens", "sampled", "logprob", "top_ids", "top_logprobs")
            if name in shapes
        }
        # Each slot has an array of its own: a step that reads and changes one does not copy the others.
        self._counts = [mx.zeros(vocab, mx.int32) for _ in range(slots if "counts" in shapes else 0)]
        self._logits = mx.zeros((1, int(shapes[self._end].shape[1])))
        self._hidden: mx.array | None = None
        self._order: Array = np.zeros(1, np.int64)
        self._sampled_rows = 0
        mx.eval(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, with the work queued so far included."""
        kept = [*self._buffers.values(), *self._counts]
        return [*kept, self._logits] if self._hidden is None else [*kept, self._hidden]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def tokens(self, rows: Array) -> mx.array:
        """Token ids of `rows` of the next step."""
        tokens = self._buffers["tokens"]
        together = rows[-1] - rows[0] + 1 == len(rows)
        return (
            tokens[int(rows[0]) : int(rows[-1]) + 1] if together else tokens[mx.array(rows.astype(np.int32))]
        )

    def hidden(self, states: mx.array, order: Array) -> None:
        """Set the last step's hidden states [n, hidden_size]; row r of the logits is made of
        states[order[r]].
        """
        self._hidden, self._order = states, order
        self._logits = mx.zeros((0, self._logits.shape[1]))
        self._sampled_rows = 0

    def write(self, buffer: str, data: Array, row: int) -> None:
        """See Executor.write."""
        if buffer == "counts" and 0 <= row <= len(self._counts) - len(data):
            self._counts[row : row + len(data)] = [mx.array(values) for values in data]
        elif buffer == self._end:
            known = min(len(self._logits), row)
            self._logits = mx.concatenate(
                [self._logits[:known], mx.array(data), self._logits[row + len(data) :]]
            )
            self._hidden = None
        elif buffer in self._buffers and row + len(data) <= len(self._buffers[buffer]):
            if row == 0 and len(data) == len(self._buffers[buffer]):
                self._buffers[buffer] = mx.array(data)
            else:
                self._buffers[buffer][row : row + len(data)] = mx.array(data)
        else:
            raise ValueError(f"{data.dtype}{list(data.shape)} at row {row} does not fit {buffer}")

    def current(self, buffer: str, rows: int) -> mx.array:
        """The first rows of a buffer after the work queued so far; always a new array."""
        if buffer == self._end:
            return self._rows(rows)[:rows] + 0
        if buffer == "counts":
            return mx.stack(self._counts[:rows])
        if buffer not in self._buffers:
            raise ValueError(f"mlx has no buffer {buffer} to fetch")
        return self._buffers[buffer][:rows] + 0

    def run(self, function: str, size: int, host: Mapping[str, Array]) -> None:
        """Run "greedy", "sample" or "logprobs" over `size` rows; `host` has the buffers that
        the host writes.
        """
        if function == "logprobs":
            rows = min(size, self._sampled_rows) or size
            made = logprobs(self._rows(rows)[:rows], self._buffers["sampled"][:rows])
            self._buffers |= dict(zip(("logprob", "top_ids", "top_logprobs"), made, strict=True))
            return
        ints = host["sample_i32"][:size]
        live = np.flatnonzero(ints[:, SampleI32.SLOT] >= 0)
        if not len(live):
            return
        self._sampled_rows = int(live[-1]) + 1
        logits = self._rows(self._sampled_rows)[: self._sampled_rows]
        logits = logits if len(live) == len(logits) else logits[mx.array(live.astype(np.int32))]
        if function == "greedy":
            picked = greedy(logits)
        elif function == "sample":
            picked = self._sample(logits, ints[live], host["sample_f32"][live], host)
        else:
            raise ArtifactError(f"mlx has no function {function}: upgrade nearfar")
        _put(self._buffers["sampled"], live, picked)
        feed = ints[live, SampleI32.FEED]
        if (feed >= 0).any():
            fed = np.flatnonzero(feed >= 0)
            chosen = picked if len(fed) == len(feed) else picked[mx.array(fed.astype(np.int32))]
            _put(self._buffers["tokens"], feed[fed], mx.maximum(chosen, 0))

    def _rows(self, count: int) -> mx.array:
        """At least `count` rows of logits."""
        if self._hidden is not None and len(self._logits) < count:
            order = self._order[:count]
            states = self._hidden
            if len(order) != len(states) or (order != np.arange(len(order))).any():
                states = states[mx.array(order.astype(np.int32))]
            self._logits = self._head(states)
        return self._logits

    def _sample(self, logits: mx.array, ints: Array, floats: Array, host: Mapping[str, Array]) -> mx.array:
        slots, vocab = ints[:, SampleI32.SLOT].tolist(), logits.shape[1]
        bias, words = host["logit_bias"][slots], host["allowed"][slots]
        allowed = None
        if not _all_ones(words, vocab):
            allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
        penalties = floats[:, (SampleF32.PRESENCE_PENALTY, SampleF32.FREQUENCY_PENALTY)]
        penalized = (floats[:, SampleF32.REPETITION_PENALTY] != 1).any() or penalties.any()
        counts = mx.stack([self._counts[slot] for slot in slots]) if penalized else None
        choice = SamplerRows(floats, ints, bias if bias.any() else None, allowed, counts)
        picked = sample(logits, choice)
        for row, slot in enumerate(slots):
            chosen = mx.maximum(picked[row], 0)
            self._counts[slot] = self._counts[slot].at[chosen].add((picked[row] >= 0).astype(mx.int32))
        return picked


def _put(target: mx.array, index: Array, values: mx.array) -> None:
    """Assign target[index] = values, as a slice if the index is contiguous."""
    first = int(index[0])
    if (np.diff(index) == 1).all():
        target[first : first + len(index)] = values
    else:
        target[mx.array(index.astype(np.int32))] = values


def _all_ones(words: Array, vocab: int) -> bool:
    """Whether every token of the vocabulary is allowed; bits beyond it do not count."""
    full, rest = divmod(vocab, 32)
    last = np.uint32((1 << rest) - 1)
    return bool(
        (words[:, :full] == 0xFFFFFFFF).all() and (not rest or ((words[:, full] & last) == last).all())
    )
