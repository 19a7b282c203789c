"""Jobs over what a sequence remembers besides keys and values: taps of a convolution, and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nearfar.step.operation import Activation

from .names import Output, labelled


@dataclass(frozen=True)
class Conv:
    """See nearfar.step.ops.Conv. Row i of x goes to the cache, [pages, 1, page_size, width] float32, at
    positions[i] of slots[i], except padding rows; out is of rows positions[i] − taps + 1 … positions[i].

    Rows of one sequence follow one another in a step, with consecutive positions. Padding rows give zeros.
    """

    kind: ClassVar = "conv"
    m: int
    width: int
    taps: int
    page_size: int
    slots: int
    pages_per_slot: int
    activation: Activation | None = None
    bias: bool = False

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs x f32 [m, width], weight f32 [width·taps], [bias f32 [width]], cache, positions, slots,
        page_table. The cache is written in place.
        """
        return ("x", "weight", *["bias"] * self.bias, "cache", "positions", "slots", "page_table")

    @property
    def out(self) -> Output:
        """float32 [m, width]."""
        return (self.m, self.width), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {str(self.activation): self.activation is not None, "bias": self.bias}
        return labelled(f"conv_m{self.m}_{self.width}x{self.taps}", flags)


@dataclass(frozen=True)
class Delta:
    """See nearfar.step.ops.Delta. The states are float32 [pages, heads, key_dim, value_dim]: a page has the
    state behind the last computed row of its column of `stride` positions.

    A row at position p continues the state in the page of column (p − 1) // stride, and leaves its own in
    that of column p // stride. Rows of one sequence follow one another in a step, with consecutive positions.
    Padding rows give zeros.
    """

    kind: ClassVar = "delta"
    m: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    stride: int
    slots: int
    pages_per_slot: int
    eps: float
    tiled: bool = False

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs x f32 [m, 2·key_heads·key_dim + heads·value_dim], gates f32 [m, 2·heads], a_log and
        dt_bias f32 [heads], state, positions, slots, page_table. The states are written in place.
        """
        return ("x", "gates", "a_log", "dt_bias", "state", "positions", "slots", "page_table")

    @property
    def x_width(self) -> int:
        """Columns of x."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def out(self) -> Output:
        """float32 [m, heads·value_dim]."""
        return (self.m, self.heads * self.value_dim), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        made = f"delta_m{self.m}_h{self.heads}x{self.key_heads}_{self.key_dim}x{self.value_dim}"
        return made + "_tiled" * self.tiled

    def key_head(self, head: Any) -> Any:
        """The head of q and k that belongs to a head of v, as a number or an expression."""
        return head % self.key_heads if self.tiled else head // (self.heads // self.key_heads)


@dataclass(frozen=True)
class Ssm:
    """See nearfar.step.ops.Ssm. The states are float32 [pages, heads, depth, head_dim]; pages and rows are as
    those of Delta.
    """

    kind: ClassVar = "ssm"
    m: int
    heads: int
    groups: int
    depth: int
    head_dim: int
    stride: int
    slots: int
    pages_per_slot: int
    least: float = 0.0
    most: float | None = None

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs x f32 [m, heads·head_dim + 2·groups·depth], dt f32 [m, heads], terms f32 [3·heads],
        state, positions, slots, page_table. The states are written in place.
        """
        return ("x", "dt", "terms", "state", "positions", "slots", "page_table")

    @property
    def x_width(self) -> int:
        """Columns of x."""
        return self.heads * self.head_dim + 2 * self.groups * self.depth

    @property
    def out(self) -> Output:
        """float32 [m, heads·head_dim]."""
        return (self.m, self.heads * self.head_dim), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {f"from{self.least:g}": self.least > 0, f"to{self.most}": self.most is not None}
        return labelled(f"ssm_m{self.m}_h{self.heads}x{self.groups}_{self.depth}x{self.head_dim}", flags)
