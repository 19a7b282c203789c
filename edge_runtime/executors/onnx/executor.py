"""Runs an onnx artifact: its graph in a session of ONNX Runtime, and sampling in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors.onnx.past import LaidOut, PagedPast
from nearfar.edge_runtime.executors.onnx.sampling import SamplerRow, greedy, logprobs, sample
from nearfar.edge_runtime.executors.onnx.spans import SpanBatch, batches
from nearfar.edge_runtime.executors.planned import ProgramLayout, put
from nearfar.errors import ArtifactError, DeviceError, OutOfMemory
from nearfar.format.buffers import keys, page_table, values
from nearfar.format.manifest import Program
from nearfar.format.sampler import SampleI32

Array = npt.NDArray[Any]
ERRORS_ONLY = 3
"""Log severity: ONNX Runtime warns of an input with a default, which is intended here."""


class OnnxExecutor:
    """See Executor. The results of `run` are complete when it returns.

    A step runs the graph once for all sequences that continue by one token, whatever their lengths, and once
    for each stretch of a prompt (spans.py).
    """

    name = "onnx"

    def __init__(self, artifact: Artifact, program: Program, settings: Settings) -> None:
        """Open a session and allocate the pages of the cache."""
        manifest = artifact.manifest
        if manifest.function is None:
            raise ArtifactError(f"{artifact.path} lists no graph (function). Build the artifact again")
        self.precision, self.program_name = program.precision, program.name
        self._sizes = {name: {f.size for f in buckets} for name, buckets in program.functions.items()}
        self._layout = ProgramLayout(artifact, program, settings)
        self._caches, self._groups = manifest.caches, len(manifest.groups)
        self._weights = manifest.weights.bytes
        options = ort.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = settings.threads or 0
        with self._guard("loading the model"):
            self._session: Any = ort.InferenceSession(
                str(artifact.path / manifest.function.file), options, providers=["CPUExecutionProvider"]
            )
            self._past = PagedPast(manifest.cache, manifest.groups, manifest.caches, settings.pages)
        cached = {name for group in range(self._groups) for name in self._layout.caches(group)}
        self._buffers: dict[str, Array] = {
            name: np.zeros(shape.extents, shape.dtype)
            for name, shape in self._layout.buffers.items()
            if name not in cached and not name.startswith("rope.")
        }
        if "allowed" in self._buffers:
            self._buffers["allowed"][...] = 0xFFFFFFFF

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write. Only write_pages writes the cache's pages."""
        put(self._buffer(buffer), buffer, data, row, column)

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """See Executor.prepare. ONNX Runtime makes its kernels when the session is opened."""
        return ()

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        if size not in self._sizes.get(function, ()):
            raise ArtifactError(f"the artifact has no {function} of size {size}")
        with self._guard("computing"):
            {"step": self._step, "greedy": self._take, "sample": self._take, "logprobs": self._logprobs}[
                function
            ](size, function)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch."""
        copy = self._buffer(buffer)[:rows].copy()
        return lambda: copy

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page."""
        self._past.write(group, [target], self._past.read(group, [source]))

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        read = self._past.read(group, pages)
        return {name: pair[i] for c, pair in read.items() for i, name in enumerate((keys(c), values(c)))}

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        self._layout.check_pages(group, pages, content)
        own = (c for c, cache in enumerate(self._caches) if cache.group == group)
        self._past.write(group, pages, {c: (content[keys(c)], content[values(c)]) for c in own})

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        if self._session is None:
            return 0
        return self._weights + self._past.nbytes + sum(array.nbytes for array in self._buffers.values())

    def close(self) -> None:
        """See Executor.close."""
        self._session = None
        self._buffers = {}
        if hasattr(self, "_past"):
            del self._past

    def _buffer(self, name: str) -> Array:
        if name not in self._buffers:
            raise ArtifactError(f"the artifact has no buffer {name!r}")
        return self._buffers[name]

    def _step(self, size: int, function: str) -> None:
        buffers, rows = self._buffers, min(size, len(self._buffers["logit_rows"]))
        wanted = buffers["logit_rows"][:rows] % size
        tables = [buffers[page_table(group)] for group in range(self._groups)]
        for batch in batches(buffers["positions"][:size], buffers["slots"][:size], wanted.tolist()):
            laid_out = self._past.lay_out(batch, tables)
            found = self._run(batch, laid_out)
            self._past.store(batch, laid_out, tables)
            place_of = {
                int(row): logits
                for sequence, made in zip(batch.rows, found, strict=True)
                for row, logits in zip(sequence[-batch.keep :], made, strict=True)
            }
            for index, row in enumerate(wanted.tolist()):
                if row in place_of:
                    buffers["logits"][index] = place_of[row]

    def _run(self, batch: SpanBatch, laid_out: LaidOut) -> Array:
        """Run a batch: returns logits float32 [B, keep, vocab], and appends keys and values to the laid-out
        sequences.
        """
        mask = np.arange(batch.total) < (batch.starts + batch.count)[:, None]
        given = {
            "input_ids": self._buffers["tokens"][batch.rows].astype(np.int64),
            "attention_mask": mask.astype(np.int64),
            "num_logits_to_keep": np.array(batch.keep, np.int64),
        }
        binding = self._session.io_binding()
        for name, array in given.items():
            # bind_cpu_input rejects inputs that have a default
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_output("logits", "cpu")
        for cache, pair in enumerate(laid_out.arrays):
            for part, array in zip(("key", "value"), pair, strict=True):
                where = ("cpu", 0, np.float32, array.shape, array.ctypes.data)
                binding.bind_input(f"past_key_values.{cache}.{part}", *where)
                binding.bind_output(f"present.{cache}.{part}", *where)
        self._session.run_with_iobinding(binding)
        return np.asarray(binding.get_outputs()[0].numpy())

    def _take(self, size: int, function: str) -> None:
        """Run "greedy" or "sample": write the sampled token of each row."""
        buffers = self._buffers
        for row in np.flatnonzero(buffers["sample_i32"][:size, SampleI32.SLOT] >= 0).tolist():
            ints, logits = buffers["sample_i32"][row], buffers["logits"][row]
            slot = int(ints[SampleI32.SLOT])
            if function == "greedy":
                token = greedy(logits)
            else:
                bias, counts, allowed = (buffers[name][slot] for name in ("logit_bias", "counts", "allowed"))
                token = sample(logits, SamplerRow(buffers["sample_f32"][row], ints, bias, counts, allowed))
                if token >= 0:
                    counts[token] += 1
            buffers["sampled"][row] = token
            if (feed := int(ints[SampleI32.FEED])) >= 0:
                buffers["tokens"][feed] = max(token, 0)

    def _logprobs(self, size: int, function: str) -> None:
        made = logprobs(self._buffers["logits"][:size], self._buffers["sampled"][:size])
        for name, found in zip(("logprob", "top_ids", "top_logprobs"), made, strict=True):
            self._buffers[name][:size] = found

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turn ONNX Runtime's errors into DeviceError; they have no common class but Exception."""
        try:
            yield
        except (ArtifactError, DeviceError):
            raise
        except MemoryError as error:
            raise OutOfMemory(f"no memory for {what}: {error}. Give the cache less (--kv-memory)") from error
        except Exception as error:
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            lacking = "allocate memory" in str(error) or "bad_alloc" in str(error)
            raise (OutOfMemory if lacking else DeviceError)(
                f"ONNX Runtime failed {what}: {error}. Where memory ran out, give the cache less "
                "(--kv-memory); else build the artifact again, or upgrade onnxruntime"
            ) from error
