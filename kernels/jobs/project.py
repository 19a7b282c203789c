"""The projections to q, k and v, with everything up to the cache, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .linear import Linear
from .names import Output
from .paged import RopeAppend


@dataclass(frozen=True)
class Project:
    """`linear`, the projections to q, k and v, followed by `paged` on its result, in one launch.

    `vectors`: the small vectors of both jobs, end to end in one tensor (or the only one as it is), since a
    kernel has few buffers. `rows`: the output of Rows for the step's rows.
    """

    kind: ClassVar = "project"
    linear: Linear
    paged: RopeAppend

    @property
    def m(self) -> int:
        """The number of rows."""
        return self.linear.m

    @property
    def vectors(self) -> dict[str, int]:
        """The vectors in the tensor `vectors`, in order, with their lengths."""
        linear, paged, norms = self.linear, self.paged, self.paged.norm_eps is not None
        found = {
            "norm": linear.matrix.k * (linear.norm is not None),
            "bias": linear.matrix.n * linear.bias,
            "q_norm": paged.head_dim * (paged.heads if paged.norm_all else 1) * norms,
            "k_norm": paged.head_dim * (paged.kv_heads if paged.norm_all else 1) * (norms and paged.append),
            "k_rounding": 2 * paged.kv_heads * paged.head_dim * paged.rounds_keys,
        }
        return {name: length for name, length in found.items() if length}

    @property
    def starts(self) -> dict[str, int]:
        """The index in `vectors` where each vector begins."""
        lengths = list(self.vectors.values())
        return {name: sum(lengths[:i]) for i, name in enumerate(self.vectors)}

    def inputs(self, parts: int) -> tuple[str, ...]:
        """The inputs x [m, k], the parts, [vectors f32], rows, [k_cache, v_cache]."""
        caches = ("k_cache", "v_cache") if self.paged.append else ()
        return ("x", *(f"w{i}" for i in range(parts)), *["vectors"] * bool(self.vectors), "rows", *caches)

    @property
    def out(self) -> Output:
        """q: [m, heads·head_dim] of paged.dtype."""
        return self.paged.out

    @property
    def label(self) -> str:
        """The kernel's name: the names of both jobs, without the parts that they share."""
        paged = self.paged.label.removeprefix("rope_append_").removeprefix(f"m{self.m}_")
        return f"project_{self.linear.label.removeprefix('linear_')}_{paged}"
