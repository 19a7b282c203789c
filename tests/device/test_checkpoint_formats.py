"""Quantized checkpoints in every format: read according to the format's own formula, built, and run."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantized import find_quantized
from nearfar.errors import BuildError, CheckpointError
from nearfar.format.scales import PAIRS, SYMMETRIC
from nearfar.step.reading import read_model
from tests.support.quantized import CONFIG, answer, greedy, read_back, write
from tests.support.quantized_formats import (
    ANEW,
    CENTRED,
    EXACT,
    FORMATS,
    RUN,
    Made,
    awq,
    compressed,
    gptq,
    mlc,
    nf4,
)
from tests.support.turns import share


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    made = FORMATS[name]()
    floats, carried = read_back(made.write(tmp_path / name), made.floats)
    matrices = {tensor: made.floats[tensor] for tensor in made.quantized}
    assert set(floats) == set(matrices)
    assert set(carried) == (set() if made.kept == ANEW else set(matrices))
    for tensor, value in matrices.items():
        np.testing.assert_allclose(floats[tensor], value, rtol=2e-7, atol=1e-7, err_msg=tensor)
        if made.kept == EXACT:
            np.testing.assert_array_equal(carried[tensor], value, err_msg=tensor)
        elif tensor in carried:
            largest = np.abs(value).max() / 2  # more than a quantization step of any group
            assert np.abs(carried[tensor] - value).max() <= made.step * largest, tensor


@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_symmetric_checkpoints_are_stored_without_offsets(name: str, tmp_path: Path) -> None:
    made = FORMATS[name]()
    source = open_source(BuildOptions(str(made.write(tmp_path / name)), tmp_path))
    kept = {matrix.scales for matrix in source.matrices.values() if matrix.quantized and source.keeps}
    assert kept == ({SYMMETRIC} if name in CENTRED else {PAIRS} if made.kept != ANEW else set())


@pytest.mark.parametrize("make", [lambda: gptq(8, symmetric=True), lambda: compressed(8, 64, zeros=True)])
def test_one_zero_that_is_another_needs_offsets(make: Callable[[], Made], tmp_path: Path) -> None:
    made = make()
    name = next(name for name in made.tensors if name.endswith(("qzeros", "zero_point")))
    made.tensors[name][0, 0] += 1
    source = open_source(BuildOptions(str(made.write(tmp_path / "x")), tmp_path))
    assert source.quantized is not None
    schemes = source.quantized.tensors
    other = f"{name.rpartition('.')[0]}.weight"
    assert {n for n, found in schemes.items() if found and found.scales == PAIRS} == {other}


@pytest.mark.parametrize("name", share(RUN, 2))
def test_built_and_run(name: str, tmp_path: Path) -> None:
    made = FORMATS[name]()
    root = made.write(tmp_path / name)
    found, manifest = answer(root, tmp_path / "out")
    stored = manifest["quantization"]["matrices"]
    kinds = {matrix.get("carried") for matrix in stored if matrix["name"].startswith("layers.")}
    assert kinds == {made.kept}
    steps = [matrix.get("step", 0.0) for matrix in stored]
    assert max(steps) <= made.step
    layers = [matrix for matrix in stored if matrix["name"].startswith("layers.")]
    assert {"scales" in matrix for matrix in layers} == {name in CENTRED}
    if name in CENTRED:
        assert all(matrix["scales"] == {"offsets": False} for matrix in layers)
    assert (max(steps) > 0) == (made.step > 0)
    if made.kept != ANEW:
        _, carried = read_back(root, made.floats)
        assert found == greedy({**made.floats, **carried})


@pytest.mark.parametrize("make", [*FORMATS.values(), lambda: mlc(inner=200)], ids=[*FORMATS, "mlc-filled"])
def test_what_can_be_carried_is_known_before_it_is_asked(make: Callable[[], Made], tmp_path: Path) -> None:
    """`expected` only reports: it does not change what a format says about its tensors."""
    checkpoint = open_checkpoint(str(make().write(tmp_path / "x")))
    quantized = find_quantized(checkpoint)
    assert quantized is not None
    before = dict(quantized.tensors)
    params = read_model(checkpoint.config, checkpoint.entries).model.step.params
    quantized.expected({name: shape for param in params for name, shape in param.expected().items()})
    assert quantized.tensors == before


def test_a_row_that_is_filled_up_is_requantized(tmp_path: Path) -> None:
    made = mlc(inner=200)
    source = open_source(BuildOptions(str(made.write(tmp_path / "x")), tmp_path))
    down = "model.layers.1.mlp.down_proj.weight"
    assert source.quantized is not None
    assert down not in source.keeps
    assert "model.layers.1.mlp.up_proj.weight" in source.keeps
    found = source.quantized.weights(down, 0, len(made.floats[down]))
    np.testing.assert_allclose(found, made.floats[down], rtol=2e-7, atol=1e-7)


def test_requantized_where_asked_for(tmp_path: Path) -> None:
    made = gptq(symmetric=True)
    root = made.write(tmp_path / "x")
    with pytest.raises(BuildError, match=r"GPTQ: q4, group 64.*--requantize q8"):
        open_source(BuildOptions(str(root), tmp_path, quant="q8"))
    found, manifest = answer(root, tmp_path / "out", requantize="none")
    assert found == greedy(made.floats)
    matrices = manifest["quantization"]["matrices"]
    assert {m["carried"] for m in matrices if "carried" in m} == {ANEW}
    assert {m["bits"] for m in matrices} == {16}
    source = open_source(BuildOptions(str(root), tmp_path, requantize="q8", group_size=32))
    assert {(m.bits, m.group) for m in source.matrices.values()} == {(8, 32)}


def test_what_cannot_be_asked_for_together_is_refused(tmp_path: Path) -> None:
    made = awq()
    root = made.write(tmp_path / "x")
    with pytest.raises(BuildError, match="--quant q4 and --requantize q8 are both given"):
        open_source(BuildOptions(str(root), tmp_path, quant="q4", requantize="q8"))
    config = {key: value for key, value in made.config.items() if key != "quantization_config"}
    plain = write(tmp_path / "y", config, made.floats)
    with pytest.raises(BuildError, match="is not quantized and --requantize asks for q8: use --quant q8"):
        open_source(BuildOptions(str(plain), tmp_path, requantize="q8"))


def test_a_bias_that_is_not_zero_is_not_left_out(tmp_path: Path) -> None:
    made = gptq()
    bias = "model.layers.0.mlp.up_proj.bias"
    made.tensors[bias][3] = 1
    with pytest.raises(CheckpointError, match=f"1 extra: {bias}"):
        open_source(BuildOptions(str(made.write(tmp_path / "x")), tmp_path))


def test_a_group_that_there_is_not_is_named(tmp_path: Path) -> None:
    made = gptq()
    made.tensors["model.layers.1.mlp.up_proj.g_idx"][5] = 2
    root = made.write(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"up_proj.g_idx' gives input 5 group 2, but has 2 groups"):
        open_source(BuildOptions(str(root), tmp_path))


def changed(made: Made, *path: str, to: object) -> Made:
    """The checkpoint with one setting changed."""
    config = copy.deepcopy(made.config)
    place = config["quantization_config"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return replace(made, config=config)


def carry_all(root: Path) -> None:
    """Open the checkpoint and read some rows of each matrix."""
    source = open_source(BuildOptions(str(root), root / "out"))
    assert source.quantized is not None
    for name in source.keeps:
        source.quantized.carry(name, 0, 4)


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (changed(awq(), "version", to="gemv"), r"version is \"gemv\"; expected gemm"),
        (changed(awq(), "bits", to=8), "bits is 8; expected an integer from 4 to 4"),
        (changed(awq(), "group_size", to=32), r"misshapen: .*qzeros is \[2, 16\], not \[4, 16\]"),
        (changed(gptq(), "checkpoint_format", to="marlin"), "checkpoint_format"),
        (changed(gptq(), "dynamic", to={"+:.*down.*": {"bits": 8}}), "dynamic"),
        (changed(compressed(), "format", to="marlin-24"), "format is 'marlin-24', which is not read"),
        (changed(compressed(), "sparsity_config", to={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (changed(compressed(), "transform_config", to={"config_groups": {}}), "transform_config"),
        (
            changed(compressed(), *GROUP, "targets", to=["re:.*gate.*"]),
            "down_proj is quantized, and no group",
        ),
        (changed(compressed(8, 0, "int-quantized"), *GROUP, "weights", "num_bits", to=4), "not of 4 bits"),
        (changed(nf4(), "load_in_8bit", to=True), "load_in_4bit"),
        (replace(gptq(), config=CONFIG), "no quantization_config, but 14 tensors such as .*qweight"),
        (changed(gptq(), "quant_method", to="vptq"), r'quantized by "vptq", which is not read: use .*AWQ'),
        (
            changed(gptq(), "quant_method", to="torchao"),
            r'quantized by "torchao", which is not read: .*GPTQ.*, or the unquantized original',
        ),
        (replace(mlc(), config={**mlc().config, "quantization": "q4f16_0"}), '"q4f16_0", which is not read'),
        (replace(mlc(), config={**mlc().config, "model_type": "phi"}), 'model_type is "phi"'),
    ],
    ids=range(16),
)
def test_what_is_not_read_is_named(made: Made, said: str, tmp_path: Path) -> None:
    root = made.write(tmp_path / "x")
    with pytest.raises(CheckpointError, match=said):
        carry_all(root)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rms_norm_eps", "small", r'x: rms_norm_eps is "small"'),
        (
            "vocab_size",
            300,
            r"(?s)not those that mlc-chat-config\.json describes.*Check that mlc-chat",
        ),
    ],
)
def test_errors_of_an_mlc_folder_name_its_own_config(key: str, value: Any, said: str, tmp_path: Path) -> None:
    made = mlc()
    made.config["model_config"][key] = value
    with pytest.raises(CheckpointError, match=said) as error:
        open_source(BuildOptions(str(made.write(tmp_path / "x")), tmp_path))
    assert " config.json" not in str(error.value)


def test_build_and_inspect_say_what_became_of_the_weights(tmp_path: Path) -> None:
    made, scattered = gptq(), gptq(order="scattered")
    down = "model.layers.0.mlp.down_proj."
    parts = {name: value for name, value in scattered.tensors.items() if name.startswith(down)}
    root = replace(made, tensors={**made.tensors, **parts}).write(tmp_path / "x")
    command = [sys.executable, "-m", "nearfar"]
    out = str(tmp_path / "out")
    target = ["--target", "mlx", "-o", out]
    done = subprocess.run([*command, "build", str(root), *target], capture_output=True, text=True, check=True)
    said = " ".join(done.stderr.split())
    assert "weights of the checkpoint: codes exact, offsets rounded (≤ 0.00" in said
    assert "weights of the checkpoint: requantized: 1 matrices" in said
    shown = subprocess.run([*command, "inspect", out], capture_output=True, text=True, check=True).stdout
    assert "requantized: 1 matrices: layers.0.down" in " ".join(shown.split())
    facts = json.loads(
        subprocess.run([*command, "inspect", out, "--json"], capture_output=True, text=True).stdout
    )
    stored = {matrix["name"]: matrix for matrix in facts["quantization"]["matrices"]}
    assert stored["layers.0.down"]["carried"] == ANEW
    assert 0 < stored["layers.0.qkv"]["step"] < 0.0075
    assert facts["provenance"]["checkpoint_format"] == "GPTQ"
    anew = ["--requantize", "q8", "--group-size", "32"]
    subprocess.run([*command, "build", str(root), *target, *anew], capture_output=True, check=True)
    quantization = json.loads((tmp_path / "out" / "mlx" / "manifest.json").read_text())["quantization"]
    assert {(m["bits"], m["group_size"]) for m in quantization["matrices"]} == {(8, 32)}
