"""Jobs on the paged cache: appending keys and values, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nearfar.format.kv import ROUNDED

from .names import Output, labelled, short


@dataclass(frozen=True)
class Split:
    """Attention in two launches: the positions that a row sees are divided into at most `count` parts.

    The positions form blocks of `block`, starting at the first that the row sees; a part has ⌈blocks/count⌉
    blocks, so short rows have fewer parts. The array is [m, heads, count, head_dim + TAIL] in the
    activations' dtype: a part's own attention, then the logarithm of its sum of exponentials as two numbers
    (the second is the rounding error of the first), then unused values. Parts beyond a row's length are
    uninitialized; readers must skip them. `window`, `sinks`: as in Attend; parts do not include sinks.
    """

    TAIL: ClassVar = 4
    count: int
    block: int
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Paged:
    """The shapes that attention and the append before it share: heads, and their layer's paged cache."""

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    slots: int
    pages_per_slot: int
    dtype: str
    """dtype of q and of the output."""
    kv_dtype: str
    """dtype of the cache: "float32" or "float16", or quantized "int8" or "int4" (nearfar.format.kv)."""

    @property
    def q_shape(self) -> tuple[int, int]:
        """[m, heads·head_dim]."""
        return self.m, self.heads * self.head_dim

    @property
    def _paged_label(self) -> str:
        return f"m{self.m}_h{self.heads}x{self.kv_heads}x{self.head_dim}_{short(self.kv_dtype)}"


@dataclass(frozen=True)
class RopeAppend(Paged):
    """Norms and rotation of q and k, by position; k and v of the rows go to the cache, q comes out.

    The steps, in order, each if its field is set:
    1. `norm_eps`: RMS norm of q with q_norm and of k with k_norm, of each head by itself with weights
       [head_dim]; with `norm_all` over all heads of q (weights [heads·head_dim]) and all of k (weights
       [kv_heads·head_dim]). `norm_after`: after the rotation, not before it.
    2. `rope`: pairs (i, i + head_dim/2) are rotated by row positions[m] of the table: cosines, then sines.
    3. `q_scale` (beta, original): q·(1 + beta·ln(1 + ⌊position/original⌋)), as Ministral 3 does.
    4. `v_norm_eps`: RMS norm of each head of v, without weights.
    5. k and v are written to the cache (kv_dtype [pages, kv_heads, page_size, head_dim]; quantized, a row by
       itself, to the words of nearfar.format.kv.rows_of), except padding rows. With `rounds_keys`, k_rounding
       has [2, head_dim] for each head (nearfar.format.kv.rounding): the first vector is subtracted from k;
       once k is in codes, each group's offset grows by the sum, over its components, of the second vector
       times the codes' rounding errors.
    Without `append` x holds q alone, [m, heads·head_dim]: the layer reads another layer's cache.
    """

    kind: ClassVar = "rope_append"
    rope: bool = True
    norm_eps: float | None = None
    norm_all: bool = False
    norm_after: bool = False
    v_norm_eps: float | None = None
    q_scale: tuple[float, float] | None = None
    append: bool = True

    @property
    def rounds_keys(self) -> bool:
        """Whether keys become codes with weights from a calibration (nearfar.format.kv.rounding)."""
        return self.append and self.kv_dtype in ROUNDED

    @property
    def x_heads(self) -> int:
        """The number of heads in a row of x."""
        return self.heads + 2 * self.kv_heads * self.append

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs in order: x [m, x_heads·head_dim] (dtype), positions, slots, page_table, [rope],
        [q_norm, [k_norm]], [k_rounding], [k_cache, v_cache].

        positions, slots int32 [256]; page_table int32 [slots, pages_per_slot]; rope f32 [context, head_dim];
        norms f32; k_rounding f32 [2·kv_heads·head_dim]. The caches are written in place. Without `append`
        there are no slots, page_table, k_norm, k_rounding and caches.
        """
        where = ("positions", "slots", "page_table") if self.append else ("positions",)
        norms = ("q_norm", *["k_norm"] * self.append) if self.norm_eps is not None else ()
        caches = ("k_cache", "v_cache") if self.append else ()
        return ("x", *where, *["rope"] * self.rope, *norms, *["k_rounding"] * self.rounds_keys, *caches)

    @property
    def out(self) -> Output:
        """q: [m, heads·head_dim] of dtype."""
        return self.q_shape, self.dtype

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {
            "norope": not self.rope,
            "norm": self.norm_eps is not None,
            "all": self.norm_all,
            "after": self.norm_after,
            "vnorm": self.v_norm_eps is not None,
            "qscale": self.q_scale is not None,
            "q": not self.append,
        }
        return labelled(f"rope_append_{self._paged_label}", flags)


@dataclass(frozen=True)
class Rows:
    """The facts about a step's rows that `Project` needs: one launch a step, for all layers that agree on
    them.

    out: int32 [m, FACTS + head_dim], numbers as their bits: the place of the row's position in the cache,
    page·page_size + offset (-1: none, the row is padding, or nothing is appended); the factor of q (1.0
    without `q_scale`); two zeros; with `rope` the row's cosines, then sines.
    """

    kind: ClassVar = "rows"
    FACTS: ClassVar = 4
    m: int
    head_dim: int
    """Values of a head that rotate; 0: nothing is rotated."""
    page_size: int
    slots: int
    pages_per_slot: int
    append: bool
    q_scale: tuple[float, float] | None = None

    @staticmethod
    def of(job: RopeAppend) -> Rows:
        """The Rows job that a RopeAppend job needs."""
        return Rows(
            job.m, job.head_dim * job.rope, job.page_size, job.slots, job.pages_per_slot, job.append,
            job.q_scale,
        )  # fmt: skip

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs positions, [slots, page_table], [rope]: see RopeAppend."""
        return (
            "positions",
            *(("slots", "page_table") if self.append else ()),
            *["rope"] * bool(self.head_dim),
        )

    @property
    def out(self) -> Output:
        """int32 [m, FACTS + head_dim]."""
        return (self.m, self.FACTS + self.head_dim), "int32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {"append": self.append, "qscale": self.q_scale is not None}
        return labelled(f"rows_m{self.m}_{self.head_dim}", flags)


@dataclass(frozen=True)
class Attend(Paged):
    """Causal attention of the rows over their sequences' pages.

    Row i sees positions p ≤ positions[i] of slots[i], with `window` only the last `window` of them, its own
    included; earlier pages may be missing and are not read. Scores are scale·q·k; `softcap` c:
    c·tanh(score/c). `sinks`: f32 [heads], one more logit in the softmax of each head, without a value.
    Padding rows give zeros. `split`: the output stays in parts, with the same window as the job.
    """

    kind: ClassVar = "attention"
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    split: Split | None = None

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs q, k_cache, v_cache, positions, slots, page_table, [sinks]."""
        return ("q", "k_cache", "v_cache", "positions", "slots", "page_table", *["sinks"] * self.sinks)

    @property
    def out(self) -> Output:
        """[m, heads·head_dim] of dtype; with `split` the array of parts (see Split)."""
        if self.split is not None:
            return (self.m, self.heads, self.split.count, self.head_dim + Split.TAIL), self.dtype
        return self.q_shape, self.dtype

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {
            f"w{self.window}": self.window is not None,
            "cap": self.softcap is not None,
            "sinks": self.sinks,
            f"split{self.split.count if self.split else 0}": self.split is not None,
        }
        return labelled(f"attention_{self._paged_label}", flags)
