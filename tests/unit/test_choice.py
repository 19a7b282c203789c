"""How a target stores the codes of a quantized checkpoint: unchanged where it has their groups, else as finer
codes that are as near to the weights as such codes can be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.options import BuildOptions
from nearfar.build.source import Source, open_source
from nearfar.build.targets import target_names, target_of
from nearfar.build.weights.quantize import F32, dequantize
from nearfar.build.weights.quantized.gguf import Gguf
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS
from nearfar.build.weights.stream import MatrixRows, WeightStream
from nearfar.errors import BuildError
from nearfar.format.scales import GROUP_SIZES, SYMMETRIC, VALUE_BITS
from nearfar.kernels.quantized import QuantTensor, StorableMatrices
from tests.support.gguf_files import MIXED, mixed, type_of
from tests.support.paths import ROOT
from tests.support.quantized import read_back
from tests.support.quantized_formats import FORMATS, Made, compressed, gptq

MLX = target_of("mlx").held
BECOMES = {"Q2_K": (4, 32), "Q3_K": (5, 32), "Q6_K": (8, 32)}
"""GGUF's types with groups of 16, and their schemes where groups of 32 are the smallest."""


class Rows:
    """A writer that keeps the rows of each tensor."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[MatrixRows]] = {}

    def rows(self, tensor: str, piece: MatrixRows) -> None:
        self.pieces.setdefault(tensor, []).append(piece)

    def vector(self, *_: object) -> None: ...

    def finish(self) -> Any: ...

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None: ...


def written(source: Source) -> dict[str, F32]:
    """The stored values of the matrices' tensors."""
    rows = Rows()
    stream = WeightStream(
        source.params, source.matrices, source.checkpoint, source.quantized, source.keeps, source.report
    )
    stream.write([rows], lambda _: None)
    group = {name: source.matrices[p.name].group for p in source.params if p.is_matrix for name in p.tensors}

    def floats(name: str, part: MatrixRows) -> F32:
        return dequantize(part, group[name]) if isinstance(part, QuantTensor) else part.astype(np.float32)

    return {
        name: np.concatenate([floats(name, part) for part in parts]) for name, parts in rows.pieces.items()
    }


def opened(path: Path) -> Source:
    return open_source(BuildOptions(str(path), path.parent / "out"))


def nearest(weights: F32, bits: int, group: int) -> F32:
    """Squared error by group of rounding to the nearest of evenly spaced codes between the group's ends."""
    apart = weights.reshape(len(weights), -1, group)
    low = apart.min(2, keepdims=True).astype(np.float16).astype(np.float32)
    top = 2**bits - 1
    step = ((apart.max(2, keepdims=True) - low) / top).astype(np.float16).astype(np.float32)
    codes = np.clip(np.round((apart - low) / np.where(step == 0, 1, step)), 0, top)
    return np.asarray(((codes * step + low - apart) ** 2).sum(2))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K"])
def test_what_is_made_anew_is_as_near_as_its_codes_allow(kind: str, tmp_path: Path) -> None:
    """Measured errors: 0.18 of the type's own rounding for Q2_K, 0.23 for Q3_K, 0.25 for Q6_K."""
    file, floats = mixed(tmp_path, kind)
    source = opened(file).held_by("mlx", MLX)
    bits, group = BECOMES[kind]
    assert {(matrix.bits, matrix.group) for matrix in source.matrices.values()} == {(bits, group)}
    assert source.scheme.label == f"q{bits} in groups of {group}"
    assert source.report.anew == {(kind, source.scheme.label): len(floats)}
    assert isinstance(source.quantized, Gguf)
    for name, found in written(source).items():
        n, k = floats[name].shape
        errors = (found - floats[name]) ** 2
        by_group = errors.reshape(n, k // group, group).sum(2)
        least = nearest(floats[name], bits, group)
        apart = floats[name].reshape(n, k // group, group)
        step = np.ptp(apart, axis=2) / (2**bits - 1)
        rounded = 2.0**-11 * np.abs(apart).max(2)  # the scale and the offset are rounded to float16
        assert (by_group <= group * (step / 2 + rounded) ** 2).all()
        assert by_group.sum() < least.sum()
        steps = source.quantized.affine(name.removesuffix(".weight"), 0, n).scales
        # the error is that of the rounding itself
        assert errors.mean() <= 0.26**2 * (steps.astype(np.float64) ** 2).mean() / 12
    assert set(source.report.carried.values()) == {"requantized"}


@pytest.mark.parametrize(
    ("kind", "becomes"), [("IQ1_M", "q8 in groups of 32"), ("IQ2_XS", "float16"), ("IQ2_S", "float16")]
)
def test_rare_types_in_groups_of_16_are_requantized_where_a_target_lacks_them(
    kind: str, becomes: str, tmp_path: Path
) -> None:
    source = opened(mixed(tmp_path, kind)[0]).held_by("mlx", MLX)
    assert {name for (was, name) in source.report.anew if was == kind} == {becomes}


RARE = ("IQ1_M", "IQ2_XS", "IQ2_S")


@pytest.mark.parametrize("kind", sorted(set(BLOCKS) - set(BECOMES) - set(RARE)))
def test_what_a_target_holds_is_carried_over(kind: str, tmp_path: Path) -> None:
    source = opened(mixed(tmp_path, kind)[0])
    for target in target_names():
        held = target_of(target).held
        found = source.held_by(target, held)
        assert all(map(held.holds, found.matrices.values()))
        assert (found.keeps, found.report.anew) == (source.keeps, {})
        blocks = BLOCKS[kind]
        bits = blocks.bits if not blocks.scales.table or blocks.scales in held.scales else VALUE_BITS
        assert {(m.bits, m.group) for m in found.matrices.values()} == {
            (bits, min(blocks.group, max(GROUP_SIZES)))
        }
        assert {m.scales for m in source.matrices.values()} == {BLOCKS[kind].scales}
    assert source.keeps == set(source.quantized.tensors if source.quantized else ())


@pytest.mark.parametrize("kind", MIXED)
def test_of_tensors_that_are_stored_alike_each_keeps_what_it_can(kind: str, tmp_path: Path) -> None:
    """q, k and v are one matrix: where only v is in groups of 16, q and k keep their codes, widened."""
    file, floats = mixed(tmp_path, kind)
    base = opened(file)
    source = base.held_by("mlx", MLX)
    found, exact = written(source), written(base.held_by("onnx", StorableMatrices.pairs()))
    anew = {name for name in floats if type_of(kind, name) in BECOMES}
    beside = {n for n in floats if "q_proj" in n or "v_proj" in n} if kind == "partly floats" else set()
    assert source.quantized is not None
    assert set(source.quantized.tensors) - source.keeps == anew | beside
    for name in source.keeps:
        np.testing.assert_array_equal(found[name], exact[name], err_msg=name)
    for name in beside:
        assert np.abs(found[name] - floats[name]).max() <= 2**-11 * np.abs(floats[name]).max()


def test_scales_without_offsets_stay_so_where_tensors_are_computed_together(tmp_path: Path) -> None:
    """A GPU stores q, k and v in one scheme: codes of more bits, in which another code stands for 0."""
    file, floats = mixed(tmp_path, "Q5_0 and Q8_0")
    source = opened(file).held_by("webgpu", target_of("webgpu").held)
    assert {m.bits for m in source.matrices.values()} == {5, 8}
    assert {m.scales for m in source.matrices.values()} == {SYMMETRIC}
    assert not any(m.pieces for m in source.matrices.values())
    assert not source.report.anew
    for name, found in written(source).items():
        np.testing.assert_array_equal(found, floats[name], err_msg=name)
    assert set(source.report.carried.values()) == {"exact"}


GROUPS_OF_16 = {"gptq-16": lambda: gptq(4, 16), "pack-quantized-8-16": lambda: compressed(8, 16)}


@pytest.mark.parametrize("name", [*FORMATS, *GROUPS_OF_16])
def test_no_format_is_refused_by_a_target(name: str, tmp_path: Path) -> None:
    made: Made = {**FORMATS, **GROUPS_OF_16}[name]()
    root = made.write(tmp_path / "model")
    base = opened(root)
    for target in target_names():
        held = target_of(target).held
        source = base.held_by(target, held)
        assert all(map(held.holds, source.matrices.values())), target
        if source is base:
            continue
        if not source.report.anew:  # scales that a target cannot store alone become pairs, value for value
            assert {m.scales for m in base.matrices.values() if m.quantized} == {SYMMETRIC}
            found, same = written(source), written(base)
            for tensor in made.quantized:
                np.testing.assert_array_equal(found[tensor], same[tensor])
            continue
        (((was, becomes), count),) = source.report.anew.items()
        assert (was, becomes, count) == {
            "gptq-16": ("GPTQ q4 in groups of 16", "q6 in groups of 32", 14),
            "pack-quantized-8-16": ("compressed-tensors q8 in groups of 16", "float16", 14),
            "nvfp4-pack-quantized": ("compressed-tensors q5 in groups of 16", "q8 in groups of 32", 14),
        }[name]
        floats, _ = read_back(root, made.floats)
        found = written(source)
        for tensor, values in floats.items():
            assert (found[tensor] - values).std() <= values.std() / 30, tensor


def test_groups_that_were_asked_for_are_not_changed() -> None:
    source = open_source(BuildOptions(str(ROOT / "examples" / "sample-model"), Path("out"), group_size=16))
    with pytest.raises(BuildError, match="mlx has no kernels for groups of 16: use --group-size 32, 64"):
        source.held_by("mlx", MLX)
