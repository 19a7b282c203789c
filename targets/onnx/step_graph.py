"""A step's graph under construction: its inputs, its values, and helpers for operations."""

from __future__ import annotations

from collections.abc import Mapping

from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model
from nearfar.step.ops import RopeAppend
from nearfar.targets.onnx.external import Placed
from nearfar.targets.onnx.graph import Extents, Graph
from nearfar.targets.onnx.matrices import MatrixNodes

Pair = tuple[str, str]
"""Two values: keys and values, or cosines and sines."""


class StepGraph:
    """The graph of a model. `values`: the name in the graph of each value of the list.

    For each cache, `past` has the keys and values before the step, `new` those of the step's rows, and
    `appended` all of them, which the first attention over the cache returns. `projected` has the name and the
    record of each value that RopeAppend made. `shared` has the caches that layers read without appending.
    """

    def __init__(
        self,
        model: Model,
        matrices: Mapping[str, Matrix],
        placed: Mapping[str, Mapping[str, Placed]],
        single: Mapping[str, Placed],
        int8: bool,
    ) -> None:
        """`placed`: the arrays of each matrix; `single`: vectors and tables of rotations by name."""
        self.step, self._single = model.step, single
        self.graph = Graph(model.architecture)
        self.products = MatrixNodes(self.graph, matrices, placed, int8)
        self.values: dict[str, str] = {}
        self.projected: dict[str, tuple[str, RopeAppend]] = {}
        self.shared = _shared_caches(model)
        self.appended: dict[int, Pair] = {}
        self.past: dict[int, Pair] = {}
        self.new: dict[int, Pair] = {}
        self._turned: dict[str, Pair] = {}
        self._inputs()

    def _inputs(self) -> None:
        """Add the inputs, and the values that every attention reads."""
        graph = self.graph
        self.ids = graph.input("input_ids", "int64", ["batch_size", "sequence_length"])
        mask = graph.input("attention_mask", "int64", ["batch_size", "total_sequence_length"])
        for index, cache in enumerate(self.step.caches):
            shape: Extents = ["batch_size", cache.kv_heads, "past_sequence_length", cache.head_dim]
            self.past[index] = (
                graph.input(f"past_key_values.{index}.key", "float32", shape),
                graph.input(f"past_key_values.{index}.value", "float32", shape),
            )
        self.kept = graph.input("num_logits_to_keep", "int64", [], default=0)
        one = graph.constant([1], "int64")
        seen = graph.node("ReduceSum", mask, one, keepdims=1)  # [B, 1]
        lengths = graph.node("Sub", graph.node("ReduceSum", mask, one, keepdims=0), one)
        self.lengths = graph.node("Cast", lengths, to=6)
        total = graph.node("Gather", graph.node("Shape", mask), graph.constant(1, "int64"))
        self.total = graph.node("Cast", total, to=6)
        count = graph.node("Gather", graph.node("Shape", self.ids), graph.constant(1, "int64"))
        start = graph.node("Max", graph.node("Sub", seen, count), graph.constant([[0]], "int64"))
        zero, step = graph.constant(0, "int64"), graph.constant(1, "int64")
        self._positions = graph.node("Add", start, graph.node("Range", zero, count, step))  # [B, L]

    def rotated(self, x: str, rope: str, heads: int, dim: int) -> str:
        """Rotate the pairs (i, i + dim/2) of each head of x."""
        graph = self.graph
        if rope not in self._turned:  # [B, L, 1, dim/2]
            found = [graph.node("Gather", self.table(rope, part), self._positions) for part in ("cos", "sin")]
            axis = graph.constant([2], "int64")
            cos, sin = (graph.node("Unsqueeze", part, axis) for part in found)
            self._turned[rope] = (cos, sin)
        cos, sin = self._turned[rope]
        apart = graph.node("Reshape", x, graph.constant([0, 0, heads, dim], "int64"))
        one, two = graph.nodes("Split", 2, apart, axis=-1, num_outputs=2)
        low = graph.node("Sub", graph.node("Mul", one, cos), graph.node("Mul", two, sin))
        high = graph.node("Add", graph.node("Mul", two, cos), graph.node("Mul", one, sin))
        both = graph.node("Concat", low, high, axis=-1)
        return graph.node("Reshape", both, graph.constant([0, 0, heads * dim], "int64"))

    def grown(self, q: str, beta: float, original: float) -> str:
        """q·(1 + beta·ln(1 + ⌊position/original⌋))."""
        graph, one = self.graph, self.graph.constant(1, "float32")
        positions = graph.node("Cast", self._positions, to=1)
        whole = graph.node("Floor", graph.node("Div", positions, graph.constant(original, "float32")))
        logs = graph.node(
            "Mul", graph.node("Log", graph.node("Add", whole, one)), graph.constant(beta, "float32")
        )
        factor = graph.node("Unsqueeze", graph.node("Add", logs, one), graph.constant([-1], "int64"))
        return graph.node("Mul", q, factor)

    def rms(self, x: str, weight: str | None, eps: float, groups: int | None) -> str:
        """Each of `groups` equal parts of a row (None: the whole row) normalized separately, times the
        weight.

        The nodes are the ones that ONNX Runtime fuses into one operator, and onnx knows all of them.
        """
        graph = self.graph
        if groups is not None:
            x = graph.node("Reshape", x, graph.constant([0, 0, groups, -1], "int64"))
        squares = graph.node("Pow", x, graph.constant(2, "float32"))
        mean = graph.node("ReduceMean", squares, graph.constant([-1], "int64"), keepdims=1)
        root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(eps, "float32")))
        out = graph.node("Div", x, root)
        if weight is not None:
            out = graph.node("Mul", out, weight)
        return out if groups is None else graph.node("Reshape", out, graph.constant([0, 0, -1], "int64"))

    def slice(self, x: str, start: int, end: int) -> str:
        """Columns [start, end) of x."""
        graph = self.graph
        return graph.node("Slice", x, *(graph.constant([value], "int64") for value in (start, end, -1)))

    def times(self, x: str, factor: float) -> str:
        """x·factor; x itself if the factor is 1."""
        return x if factor == 1.0 else self.graph.node("Mul", x, self.graph.constant(factor, "float32"))

    def vector(self, name: str) -> str:
        """A parameter vector."""
        return self.graph.external(name, self._single[name])

    def table(self, rope: str, part: str) -> str:
        """Cosines (`part` "cos") or sines ("sin") of a rotation, by position."""
        return self.graph.external(f"rope.{rope}.{part}", self._single[f"rope.{rope}.{part}"])


def _shared_caches(model: Model) -> set[int]:
    """Caches that some layers read without appending; their keys are stored rotated."""
    return {op.cache for op in model.step.ops if isinstance(op, RopeAppend) and not op.append}
