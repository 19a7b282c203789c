"""Counter-based random numbers: the noise of a token depends on the seed, its position and its id only.

The hash is pcg4d of Jarzynski & Olano, *Hash Functions for GPU Rendering*, JCGT 2020, as in docs/artifact.md.
Every target and this engine draw the same numbers, so a text does not depend on its batch.
"""

from __future__ import annotations

import torch

SPAN = 19.5
"""Upper bound of the largest noise less the smallest (ln 2²⁴ = 16.64, -ln(25 ln 2) = -2.85). A logit that is
further below the largest cannot win.
"""


def gumbel(
    seed_low: torch.Tensor, seed_high: torch.Tensor, counter: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """Return Gumbel noise float32 for int64 tensors of one shape (only the low 32 bits count).

    int32 arithmetic wraps in torch, as the hash needs; a right shift copies the sign bit, and the copies are
    masked off.
    """
    x, y, z, w = (_wrap(part) * 1664525 + 1013904223 for part in (seed_low, seed_high, counter, token))
    x, y, z, w = _round(x, y, z, w)
    x, y, z, w = (part ^ ((part >> 16) & 0xFFFF) for part in (x, y, z, w))
    x = _round(x, y, z, w)[0]
    uniform = (((x >> 8) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(torch.clamp(-torch.log(uniform), min=2.0**-24))


def split_seed(seed: int) -> tuple[int, int]:
    """Split a seed into its low and high 32 bits, a negative one in two's complement."""
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
