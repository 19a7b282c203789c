"""Weights as the graph names them, and the checkpoint tensors they are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """One weight: a matrix [n, k] (rows of `sources` stacked), or a float32 vector [n] where `k` is 0.

    `sources` are (checkpoint tensor name, its rows).
    """

    name: str
    sources: tuple[tuple[str, int], ...]
    k: int = 0

    @property
    def n(self) -> int:
        """Rows in all."""
        return sum(rows for _, rows in self.sources)

    @property
    def is_matrix(self) -> bool:
        """Whether it can be quantized."""
        return self.k > 0

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape of each source tensor."""
        return {name: (rows, self.k) if self.is_matrix else (rows,) for name, rows in self.sources}
