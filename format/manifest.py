"""The manifest of an artifact as typed records (docs/artifact.md). manifest_file.py reads and checks them."""

from __future__ import annotations

import functools
import hashlib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearfar.format.adapters import DeviceClass
from nearfar.format.answers import AnswerFormat
from nearfar.format.kv import Float, KvDtype
from nearfar.format.sampling import NOTHING, SamplingDefaults
from nearfar.format.scales import PAIRS, Scales, matrix_bytes
from nearfar.step.model import op_of, param_of
from nearfar.step.operation import Op, chosen_from
from nearfar.step.ops import Embedding, Experts, Route
from nearfar.step.params import Param
from nearfar.step.shapes import Parts

FORMAT = "nearfar-artifact"
VERSION = 5
"""The newest version of the format. Manifests in which the codes of a matrix have a table have it."""
SCALED = 4
"""The version of manifests in which a matrix has other scales than float16 pairs, or pieces, and none has a
table; all others have OLDEST.
"""
OLDEST = 3
"""The oldest version that is read."""
LISTING = "nearfar-targets"
"""The `format` of a listing that a server may send if a folder of several targets has no manifest.json."""

Dim = int | str
"""A dimension: a number, or "pages.<group>" or "context", which the runtime chooses."""


@dataclass(frozen=True)
class Model:
    """The facts about a model that a runtime needs, and its special tokens. `step` says what the model
    computes.
    """

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    task: Literal["generate", "embed"] = "generate"
    """The result of a step: "generate" for logits, "embed" for embeddings."""


@dataclass(frozen=True)
class Cache:
    """Geometry of the paged cache."""

    page_size: int
    slots: int


@dataclass(frozen=True)
class Group:
    """Caches of layers that look equally far back. Each group has pages and a page table of its own.

    `window`: positions that the layers attend to, the row's own included; None: all. `stride`: positions of a
    column of states, each page of which holds the state behind the last computed row of its column; None: a
    column is `cache.page_size` positions.
    """

    window: int | None = None
    stride: int | None = None


@dataclass(frozen=True)
class KvCache:
    """What a layer keeps in pages, and other layers may read too. `parts`: "kv" is keys and values, "k" one
    tensor, "state" a matrix [depth, head_dim] for each head.
    """

    kv_heads: int
    head_dim: int
    group: int
    parts: Parts = "kv"
    depth: int = 0


@dataclass(frozen=True)
class ShortRope:
    """LongRoPE's short set: the frequencies of engines whose context is at most `context`."""

    inv_freq: str | tuple[float, ...]
    context: int


@dataclass(frozen=True)
class Rope:
    """How the runtime makes a buffer `rope.<name>`: frequencies (mlx) or the tensor that holds them, and a
    factor.

    Pair i turns by position · inv_freq[i]; cosine and sine are multiplied by `scale`. A pair with inv_freq 0
    is neither turned nor scaled.
    """

    inv_freq: str | tuple[float, ...]
    scale: float
    short: ShortRope | None = None

    def frequencies(self, context: int) -> str | tuple[float, ...]:
        """The frequencies of an engine whose sequences have at most `context` positions."""
        return self.short.inv_freq if self.short and context <= self.short.context else self.inv_freq

    def all_frequencies(self) -> tuple[str | tuple[float, ...], ...]:
        """The frequencies of all engines, with long and short contexts."""
        return (self.inv_freq, *([self.short.inv_freq] if self.short else []))


@dataclass(frozen=True)
class StepRecords:
    """The step as data: operations and parameters as nearfar.step.model writes and reads them."""

    ops: tuple[dict[str, Any], ...]
    params: tuple[dict[str, Any], ...]

    @functools.cached_property
    def operations(self) -> tuple[Op, ...]:
        """The operations in `ops`; ValueError for an unknown one, which `parse` has ruled out."""
        return tuple(map(op_of, self.ops))

    @functools.cached_property
    def embedding(self) -> int | None:
        """The width of the embeddings that the step gives; None if it gives logits."""
        end = self.operations[-1] if self.operations else None
        return end.width if isinstance(end, Embedding) else None

    @functools.cached_property
    def parameters(self) -> tuple[Param, ...]:
        """The parameters in `params`; ValueError for an invalid one, which `parse` has ruled out."""
        return tuple(map(param_of, self.params))

    def share(self, param: str, rows: int) -> float:
        """The largest share of a parameter that a step of `rows` rows reads: of the matrices of experts,
        those that the rows choose.
        """
        chosen = self.chosen.get(param)
        return 1.0 if chosen is None else min(1.0, rows * chosen[0] / chosen[1])

    @functools.cached_property
    def chosen(self) -> dict[str, tuple[int, int]]:
        """How many matrices of a stack each row chooses, and of how many, by the parameter's name."""
        tops = {op.out: op.top for op in self.operations if isinstance(op, Route)}
        stacks = {param.name: param.stack for param in self.parameters}
        return {
            name: (tops[op.route], stacks[name])
            for op in self.operations
            if isinstance(op, Experts)
            for name in chosen_from(op)
        }


Carriage = Literal["exact", "codes exact, offsets rounded", "requantized"]
CARRIED: tuple[Carriage, ...] = typing.get_args(Carriage)
"""Ways of carrying a matrix over from a quantized checkpoint, the best first."""


@dataclass(frozen=True)
class StoredRows:
    """How some rows of a matrix are stored, if its rows are not stored alike."""

    n: int
    bits: int
    group_size: int
    scales: Scales = PAIRS


@dataclass(frozen=True)
class StoredMatrix:
    """How a matrix [n, k] is stored: `bits` in groups of `group_size` inputs, whose scales are stored as
    `scales` says, or 16 or 32 for floats. With `pieces`, these say how the rows are stored, in order.

    `reason`: why a matrix that should be quantized was not. `carried`: how it was carried over from a
    quantized checkpoint. `step`: for the checkpoint's own codes, the largest difference between a weight and
    the checkpoint's value, as a share of the distance between two codes.
    """

    name: str
    n: int
    k: int
    bits: int
    group_size: int = 0
    reason: str | None = None
    carried: Carriage | None = None
    step: float | None = None
    scales: Scales = PAIRS
    pieces: tuple[StoredRows, ...] = ()

    @property
    def newer(self) -> bool:
        """Whether readers of OLDEST cannot describe how the matrix is stored."""
        return self.scales != PAIRS or bool(self.pieces)

    @property
    def bytes(self) -> int:
        """Bytes of the matrix as it is stored."""
        rows = self.pieces or (StoredRows(self.n, self.bits, self.group_size, self.scales),)
        return sum(matrix_bytes(each.n, self.k, each.bits, each.group_size, each.scales) for each in rows)


@dataclass(frozen=True)
class Quantization:
    """How the weights were quantized: a summary, the method, and the facts of each matrix, which
    can differ.
    """

    scheme: str
    method: str = "none"
    matrices: tuple[StoredMatrix, ...] = ()


@dataclass(frozen=True)
class File:
    """A file of the artifact, with its size and SHA-256."""

    file: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, root: Path, file: Path) -> File:
        """The record (path, bytes, SHA-256) of a file below `root`, the artifact's folder."""
        data = file.read_bytes()
        return cls(file.relative_to(root).as_posix(), len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Tensor:
    """A tensor of the weight stream."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Weights:
    """The weights: a stream cut into shards; or safetensors files, whose headers describe the tensors; or
    data of an ONNX graph, which describes them.
    """

    bytes: int
    shard_bytes: int
    shards: tuple[File, ...]
    tensors: tuple[Tensor, ...]
    format: Literal["stream", "safetensors", "onnx"] = "stream"


@dataclass(frozen=True)
class Buffer:
    """A device buffer that plans name. `dtype` "kv" stands for the program's kv_dtype."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Requires:
    """The features and limits that a device must have to run a program.

    `arch` and `system`: the processor's architecture and the operating system of the program's library (cpu).
    """

    features: tuple[str, ...]
    limits: dict[str, int] = field(default_factory=dict)
    arch: str | None = None
    system: str | None = None


@dataclass(frozen=True)
class KernelParam:
    """Dtype and shape of a kernel argument (cpu)."""

    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Kernel:
    """A shader file with its entry point (webgpu; vulkan, with its workgroup size), or the params of a
    library function (cpu).
    """

    file: str | None = None
    entry: str | None = None
    access: tuple[str, ...] = ()
    sha256: str | None = None
    params: tuple[KernelParam, ...] = ()
    workgroup: tuple[int, ...] = ()


@dataclass(frozen=True)
class Function:
    """One bucket of a function: `size` rows in, `rows` rows of logits. On mlx, which builds graphs, it has no
    plan.
    """

    size: int
    rows: int
    plan: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Program:
    """Kernels and plans. `activations`: dtype of the values between kernels, except the residual stream,
    which is float32.

    `device_class`: the kind of GPU that the kernels are shaped for; None on other devices.
    """

    name: str
    activations: Float
    kv_dtype: KvDtype
    requires: Requires
    workspace: tuple[int, ...]
    kernels: dict[str, Kernel]
    functions: dict[str, tuple[Function, ...]]
    library: str | None = None
    library_sha256: str | None = None
    figures: File | None = None
    """Figures of the kernels of a program of shaders (format/figures.py), for people; no runtime
    reads them.
    """
    device_class: DeviceClass | None = None

    @property
    def precision(self) -> Literal["f16", "f32"]:
        """The precision of the program as options name it: f16 or f32."""
        return "f16" if self.activations == "float16" else "f32"


@dataclass(frozen=True)
class TokenizerFiles:
    files: tuple[File, ...]


@dataclass(frozen=True)
class Pack(File):
    """A bundle file: several small files of `program`, or of the tokenizer, in one
    (format/bundle_files.py).
    """

    program: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    format: str
    version: int
    target: str
    model: Model
    cache: Cache
    groups: tuple[Group, ...]
    caches: tuple[KvCache, ...]
    ropes: dict[str, Rope]
    step: StepRecords
    quantization: Quantization
    weights: Weights
    buffers: tuple[Buffer, ...]
    programs: tuple[Program, ...]
    tokenizer: TokenizerFiles
    config: File | None = None
    """config.json (mlx)."""
    function: File | None = None
    """The step as an exported function (mlx, if the build was requested to write it)."""
    packs: tuple[Pack, ...] = ()
    """Bundled files of artifacts that browsers load (webgpu, wasm)."""
    license: str | None = None
    answers: AnswerFormat | None = None
    """How the model marks reasoning and tool calls, if it has a chat template."""
    sampling: SamplingDefaults = NOTHING
    """Sampling parameters for requests that state none."""
    provenance: dict[str, Any] = field(default_factory=dict)
