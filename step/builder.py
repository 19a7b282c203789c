"""The builder of a step's list: model files call it in the order of the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearfar.step import ops
from nearfar.step.model import KvCache, Step
from nearfar.step.operation import Activation, Op, turned_by
from nearfar.step.params import Param, TensorPiece
from nearfar.step.rope import Rope
from nearfar.step.shapes import Shapes


@dataclass(frozen=True)
class Value:
    """The result of an operation: its name in the list, and its width in columns."""

    name: str
    width: int


class StepBuilder:
    """Collects operations, parameters, caches and tables; `finish` returns the frozen list.

    A weight is named where it is used: `pieces` say which rows of which tensors it is made of. A name used
    twice is the same weight (a tied head).
    """

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._params: dict[str, Param] = {}
        self._caches: list[KvCache] = []
        self._spellings: dict[str, tuple[TensorPiece, ...]] = {}
        self._ropes: dict[str, Rope] = {}
        self._shapes = Shapes(self._params, self._caches, self._ropes)

    # -- weights, caches, tables --

    def matrix(
        self,
        name: str,
        pieces: Sequence[TensorPiece],
        k: int,
        stack: int = 1,
        floats: bool = False,
        otherwise: Sequence[TensorPiece] = (),
    ) -> str:
        """Name a weight matrix [n, k], made of the rows of `pieces`, and return its name. `stack`, `floats`:
        see Param; `otherwise`: see Step.spellings.
        """
        return self._param(Param(name, tuple(pieces), k, stack=stack, floats=floats), otherwise)

    def vector(
        self,
        name: str,
        pieces: Sequence[TensorPiece],
        offset: float = 0.0,
        scale: float = 1.0,
        otherwise: Sequence[TensorPiece] = (),
    ) -> str:
        """Name a float32 vector, offset + scale · the checkpoint's values, and return its name.
        `otherwise`: see Step.spellings.
        """
        return self._param(Param(name, tuple(pieces), 0, offset, scale), otherwise)

    def cache(self, kv_heads: int, head_dim: int, window: int | None = None) -> int:
        """Add a layer's paged cache of keys and values, and return its index. `window`: positions that the
        layer attends to; None: all.
        """
        self._caches.append(KvCache(kv_heads, head_dim, window))
        return len(self._caches) - 1

    def state(self, heads: int, depth: int, head_dim: int) -> int:
        """Add a layer's paged cache of states [heads, depth, head_dim], and return its index."""
        self._caches.append(KvCache(heads, head_dim, parts="state", depth=depth))
        return len(self._caches) - 1

    def rope(self, name: str, rope: Rope) -> str:
        """Name a table of rotations, which all layers can use, and return its name. AssertionError if the
        name stands for another table.
        """
        if self._ropes.setdefault(name, rope) != rope:
            raise AssertionError(f"two tables of rotations are called {name!r}")
        return name

    # -- operations --

    def embed(self, tensor: str, vocab: int, width: int, scale: float = 1.0, name: str = "embed") -> Value:
        """Look up the rows of `tensor` [vocab, width] that the token ids name, times `scale`."""
        table = self.matrix(name, (TensorPiece(tensor, vocab),), width)
        return self._emit(lambda out: ops.Embed(out, table, scale), name)

    def norm(
        self,
        x: Value,
        tensor: str,
        eps: float,
        offset: float = 0.0,
        scale: float = 1.0,
        groups: int = 1,
        each: bool = False,
    ) -> Value:
        """RMS norm with the tensor's weight; `offset` is 1 if the checkpoint stores w − 1. `groups`, `each`:
        see ops.Norm.
        """
        count = x.width if each else x.width // groups
        weight = self.vector(_short(tensor), (TensorPiece(tensor, count),), offset, scale)
        return self._emit(lambda out: ops.Norm(out, x.name, weight, eps, groups, each), "norm")

    def linear(
        self,
        x: Value,
        name: str,
        pieces: Sequence[TensorPiece],
        biased: bool = False,
        bias_scale: float = 1.0,
        floats: bool = False,
    ) -> Value:
        """Multiply x by the matrix `name`, whose rows are those of `pieces`; `biased`: each piece's tensor
        has a bias, which is multiplied by `bias_scale`. `floats`: see Param.
        """
        weight = self.matrix(name, pieces, x.width, floats=floats)
        bias = self._bias(name, pieces, bias_scale) if biased else None
        return self._emit(lambda out: ops.Linear(out, x.name, weight, bias), name)

    def route(
        self,
        x: Value,
        name: str,
        piece: TensorPiece,
        route: Callable[[str, str], ops.Route],
        biased: bool = False,
    ) -> Value:
        """Choose experts by the router `name`, whose matrix is `piece`; `route` makes the record from the
        names of its result and of the logits.
        """
        weight = self.matrix(name, (piece,), x.width, floats=True)
        bias = self._bias(name, (piece,)) if biased else None
        logits = self._emit(lambda out: ops.Linear(out, x.name, weight, bias), "router")
        return self._emit(lambda out: route(out, logits.name), "route")

    def append(self, op: Op) -> Value:
        """Add an operation that the caller made; AssertionError if another operation makes its `out`."""
        if op.out in self._shapes.widths:
            raise AssertionError(f"two operations make {op.out!r}")
        self._shapes.widths[op.out] = width = op.out_width(self._shapes)
        self._ops.append(op)
        return Value(op.out, width)

    def conv(
        self,
        x: Value,
        at: str,
        taps: int,
        activation: Activation | None = None,
        biased: bool = False,
        scales: Sequence[tuple[int, float]] = (),
    ) -> Value:
        """Convolve each column of x with the `taps` weights of the module `at`, over positions.

        `biased`: the module has a bias. `scales`: numbers of neighbouring columns with a factor that their
        weights are multiplied by; absent, no weight is.
        """
        name = _short(f"{at}.weight")
        pieces, start = [], 0
        for count, scale in scales or ((x.width, 1.0),):
            pieces.append(TensorPiece(f"{at}.weight", count * taps, start * taps, scale=scale))
            start += count
        weight = self.vector(name, pieces)
        bias = self.vector(f"{name}.bias", (TensorPiece(f"{at}.bias", x.width),)) if biased else None
        self._caches.append(KvCache(1, x.width, taps, "k"))
        cache = len(self._caches) - 1
        return self._emit(lambda out: ops.Conv(out, x.name, cache, weight, taps, activation, bias), "conv")

    def glu(self, x: Value, activation: Activation) -> Value:
        """activation(gate)·up of x = [gate | up]."""
        return self._emit(lambda out: ops.Glu(out, x.name, activation), "glu")

    def act(self, x: Value, activation: Activation) -> Value:
        """activation(x)."""
        return self._emit(lambda out: ops.Act(out, x.name, activation), "act")

    def add(self, a: Value, b: Value, scale: float = 1.0) -> Value:
        """(a + b)·scale."""
        return self._emit(lambda out: ops.Add(out, a.name, b.name, scale), "x")

    def mul(self, a: Value, b: Value) -> Value:
        """a·b."""
        return self._emit(lambda out: ops.Mul(out, a.name, b.name), "mul")

    def scale(self, x: Value, tensor: str) -> Value:
        """x·w, where w is the only number of `tensor`."""
        weight = self.vector(_short(tensor), (TensorPiece(tensor, 1),))
        return self._emit(lambda out: ops.Scale(out, x.name, weight), "scaled")

    def times(self, x: Value, factor: float) -> Value:
        """x·factor; x itself if the factor is 1."""
        if factor == 1.0:
            return x
        return self._emit(lambda out: ops.Scale(out, x.name, factor=factor), "scaled")

    def columns(self, x: Value, start: int, count: int) -> Value:
        """Columns [start, start + count) of x."""
        return self._emit(lambda out: ops.Columns(out, x.name, start, count), "columns")

    def logits(
        self, x: Value, tensor: str, vocab: int, tied: bool, bias: bool = False, softcap: float | None = None
    ) -> None:
        """The last operation: the head, applied to the normalized rows named in `logit_rows`; `tied`: its
        matrix is the embedding's.
        """
        pieces = (TensorPiece(tensor, vocab),)
        weight = "embed" if tied else self.matrix("lm_head", pieces, x.width)
        added = self._bias("lm_head", pieces) if bias else None
        self._emit(lambda out: ops.Logits(out, x.name, weight, added, softcap), "logits")

    def fresh(self, hint: str) -> str:
        """A name for a value that `append` will make."""
        return f"{hint}.{len(self._ops)}"

    def finish(self) -> Step:
        """The step with everything that was added, without tables of rotations that no operation uses: a
        model's config describes them even if none of its layers rotates.
        """
        params, caches = tuple(self._params.values()), tuple(self._caches)
        used = {name for op in self._ops for name in turned_by(op)}
        ropes = {name: rope for name, rope in self._ropes.items() if name in used}
        return Step(tuple(self._ops), params, caches, ropes, dict(self._spellings))

    def _emit(self, make: Callable[[str], Op], hint: str) -> Value:
        return self.append(make(self.fresh(hint)))

    def _param(self, param: Param, otherwise: Sequence[TensorPiece] = ()) -> str:
        if self._params.setdefault(param.name, param) != param:
            raise AssertionError(f"two weights are called {param.name!r}")
        if otherwise:
            self._spellings[param.name] = tuple(otherwise)
        return param.name

    def _bias(self, name: str, pieces: Sequence[TensorPiece], scale: float = 1.0) -> str:
        added = (TensorPiece(_bias_of(p.tensor), p.rows, p.start, p.order) for p in pieces)
        return self.vector(f"{name}.bias", tuple(added), scale=scale)


def _bias_of(tensor: str) -> str:
    return f"{tensor.removesuffix('.weight')}.bias"


def _short(tensor: str) -> str:
    """The name of a parameter that is one tensor: the tensor's name without "model." and ".weight"."""
    return tensor.removeprefix("model.").removesuffix(".weight")
