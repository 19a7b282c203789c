"""Counter-based random numbers: the noise of a token depends on the seed, its position and its id, and on
nothing else.

pcg4d of Jarzynski & Olano, *Hash Functions for GPU Rendering*, JCGT 2020, as in docs/artifact.md: every
target and this engine draw the same numbers, and a text does not depend on the batch that it was made in.
"""

from __future__ import annotations

import torch

SPAN = 19.5
"""More than the largest noise less the smallest (ln 2²⁴ = 16.64, -ln(25 ln 2) = -2.85): what lies further
below the largest logit cannot win.
"""


def gumbel(
    seed_low: torch.Tensor, seed_high: torch.Tensor, counter: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """Gumbel noise float32 of int64 tensors of one shape (the low 32 bits count).

    int32 arithmetic wraps in torch, as the hash needs; a shift right brings copies of the sign, which are
    masked off.
    """
    x, y, z, w = (_wrap(part) * 1664525 + 1013904223 for part in (seed_low, seed_high, counter, token))
    x, y, z, w = _round(x, y, z, w)
    x, y, z, w = (part ^ ((part >> 16) & 0xFFFF) for part in (x, y, z, w))
    x = _round(x, y, z, w)[0]
    uniform = (((x >> 8) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(torch.clamp(-torch.log(uniform), min=2.0**-24))


def split_seed(seed: int) -> tuple[int, int]:
    """The low and the high 32 bits of a seed, a negative one in two's complement."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _wrap(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.int32)


def _round(
    x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    return x, y, z, w
