"""Jobs of mixtures of experts: the choice of experts for each row, and the chosen experts' gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nearfar.kernels.quantized import Matrix
from nearfar.step.operation import Activation, Score

from .names import Output, labelled


@dataclass(frozen=True)
class Route:
    """out[i] = the numbers of the `top` experts of row i, the best first, then their weights.

    x are logits, float32 [m, experts]. Scores are a softmax over a row, or σ of each logit. The experts with
    the highest scores (plus `bias`, float32 [experts]) are chosen, of equal ones the lower number. With
    `normalize` the chosen scores are divided by their sum + normalize; `scale`, and `factors` of the experts,
    float32 [experts], multiply them. Rows of padding have experts −1 with weights 0.
    """

    kind: ClassVar = "route"
    m: int
    experts: int
    top: int
    score: Score = "softmax"
    normalize: float | None = None
    bias: bool = False
    scale: float = 1.0
    factors: bool = False

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs x, positions int32 [256], [bias], [factors]."""
        return ("x", "positions", *["bias"] * self.bias, *["factors"] * self.factors)

    @property
    def out(self) -> Output:
        """float32 [m, 2·top]."""
        return (self.m, 2 * self.top), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {"sigmoid": self.score == "sigmoid", "bias": self.bias, "factors": self.factors}
        return labelled(f"route_m{self.m}_{self.top}of{self.experts}", flags)


@dataclass(frozen=True)
class Experts:
    """out[i] = Σ over the experts e of row i of weight · (down_e·h_e + down_bias_e), float32 [m, n].

    h_e = activation(gate)·up of [gate | up] = gate_up_e·x[i] + gate_up_bias_e, or as `clamp` says
    (step.ops.Experts). `gate_up` and `down` are stacks of matrices [2·inner, k] and [n, inner]. x is float32
    [m, k], `route` the output of Route: an expert below 0 adds nothing. The sum goes by the order of the
    row's experts. Biases are float32, stacked as the matrices. Where `gate_up` has matrices [inner, k], there
    is no gate: h_e = activation(gate_up_e·x[i] + gate_up_bias_e).
    """

    kind: ClassVar = "experts"
    m: int
    gate_up: Matrix
    down: Matrix
    top: int
    activation: Activation
    gate_up_bias: bool = False
    down_bias: bool = False
    clamp: tuple[float, float] | None = None

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.down.stack

    @property
    def inner(self) -> int:
        """The width of an expert."""
        return self.down.k

    @property
    def gated(self) -> bool:
        """Whether experts have a gate beside up."""
        return self.gate_up.each.n != self.inner

    @property
    def n(self) -> int:
        """The number of columns of the output."""
        return self.down.each.n

    @property
    def k(self) -> int:
        """The number of inputs."""
        return self.gate_up.k

    def inputs(self, parts: int) -> tuple[str, ...]:
        """The inputs x, route, the parts of gate_up, then those of down, [gate_up_bias], [down_bias]."""
        biases = (*["gate_up_bias"] * self.gate_up_bias, *["down_bias"] * self.down_bias)
        return ("x", "route", *(f"w{i}" for i in range(parts)), *biases)

    @property
    def out(self) -> Output:
        """float32 [m, n]."""
        return (self.m, self.n), "float32"

    @property
    def label(self) -> str:
        """The kernel's name, such as `experts_m1_8of64x1024_2048_q4g64`."""
        scheme = f"{self.gate_up.scheme}"
        flags = {
            self.down.scheme: self.down.scheme != scheme,
            "bias": self.gate_up_bias or self.down_bias,
            "clamped": self.clamp is not None,
            "plain": not self.gated,
        }
        return labelled(f"experts_m{self.m}_{self.top}of{self.experts}x{self.inner}_{self.n}_{scheme}", flags)
