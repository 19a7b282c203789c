"""Quantized checkpoints on every target and through every command: none is rejected because a target lacks
one of its schemes; requantized matrices are reported in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nearfar.build.targets import target_names
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS
from nearfar.cli import build as cli
from nearfar.cli import serve
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.devices import device_names
from nearfar.format.scales import IQ4
from nearfar.kernels.buckets import Buckets
from tests.support.backends import require
from tests.support.commands import nearfar
from tests.support.gguf_files import FLOATS, MIXED, mixed
from tests.support.turns import in_turns, share

KINDS = (*BLOCKS, *MIXED, *FLOATS)
PLACES = [
    *((command, target) for command in ("run", "serve") for target in device_names()),
    *(("build", target) for target in target_names()),
]
GROUPS_OF_16 = {
    **{kind: f"{name} in groups of 32" for kind, name in
       {"Q2_K": "q4", "Q3_K": "q5", "Q6_K": "q8", "IQ1_M": "q8"}.items()},
    "IQ2_XS": "float16", "IQ2_S": "float16",
}  # fmt: skip
"""GGUF's types for which MLX has no kernels, and their schemes on mlx."""


@pytest.fixture(autouse=True)
def few_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, and kernels for one row on one kind of device: kernels for all sizes take 17 CPU
    seconds.
    """
    shown = cli.build_shown
    few = {"device_classes": ("software",), "cpu_features": ("native",), "buckets": Buckets((1,), (1,))}
    monkeypatch.setattr(cli, "build_shown", lambda given, console: shown(replace(given, **few), console))
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))


@in_turns("place")
@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("kind", share(KINDS, 2))
def test_each_type_of_gguf_on_each_target(
    kind: str, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, target = place
    file, _ = mixed(tmp_path, kind)
    if command == "build":
        done = nearfar("build", file, "--target", target, "-o", tmp_path / "out")
    else:
        require(target)
        options = ("hello", "--max-tokens", 2) if command == "run" else ()
        opened: list[str] = []
        monkeypatch.setattr(serve, "run", lambda models, *_: opened.extend(models))
        done = nearfar(command, file, *options, "--device", target)
        if command == "serve":
            with Engine.load(opened[0], device=target, kv_memory="4MB") as engine:
                assert engine.completions.create("hello", max_tokens=2).choices
    assert done.returncode == 0, done.stderr
    anew = {was: to for was, to in GROUPS_OF_16.items() if was in stored(kind)} if target == "mlx" else {}
    said = [line for line in done.stderr.splitlines() if "weights for" in line]
    assert len(said) == (1 if anew or kind == "partly floats" else 0), done.stderr
    if command == "build":
        wider = [line for line in done.stderr.splitlines() if f"8 bits a weight for {target}" in line]
        assert len(wider) == (kind in IQ4 and target in ("mlx", "onnx")), done.stderr
    for was, to in anew.items():
        assert f"{was} becomes {to}" in said[0]


def test_targets_that_store_weights_differently_are_built_together(tmp_path: Path) -> None:
    """The weights are streamed once for all targets that store them alike: each file equals that of a
    separate build.
    """
    file, _ = mixed(tmp_path, "Q4_K_M")
    together = nearfar("build", file, "--target", "onnx,mlx", "-o", tmp_path / "both")
    apart = [nearfar("build", file, "--target", name, "-o", tmp_path / "one") for name in ("onnx", "mlx")]
    assert {done.returncode for done in (together, *apart)} == {0}, together.stderr
    line = "weights for mlx: Q6_K becomes q8 in groups of 32 (3 tensors); all else keeps its codes\n"
    assert [line in done.stderr for done in (together, *apart)] == [True, False, True], together.stderr
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert (tmp_path / "both" / path).read_bytes() == (tmp_path / "one" / path).read_bytes(), path


def stored(kind: str) -> Sequence[str]:
    """The types in a file of this kind."""
    return sorted(set(MIXED.get(kind, {"": kind}).values()))
