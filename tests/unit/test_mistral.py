"""Mistral's sliding window: carried to the mlx target; elsewhere the context ends where the window would matter."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.source import open_source
from nearfar.errors import CheckpointError
from nearfar.step.models import architecture
from nearfar.targets.planned import CPU
from tests.support import tiny

WINDOW = 40


def config(**changes: object) -> dict:
    return {**tiny.CONFIG, "model_type": "mistral", "sliding_window": WINDOW, **changes}


def checkpoint(root: Path, **changes: object) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config(**changes)))
    tiny.tokenizer().save(str(root / "tokenizer.json"))
    save_file({name: value.astype(np.float16) for name, value in tiny.weights().items()}, root / "model.safetensors")
    return root


def parse(**changes: object):
    return architecture(config(**changes)).parse(config(**changes))


def test_a_window_is_every_layers() -> None:
    parsed = parse()
    assert (parsed.architecture, parsed.sliding_window) == ("mistral", WINDOW)
    assert parsed.layer_types == ("sliding_attention",) * 2
    assert parse(sliding_window=None).sliding_window is None
    assert parse(layer_types=["full_attention", "sliding_attention"]).layer_types[0] == "full_attention"
    assert parse(layer_types=["full_attention"] * 2).sliding_window is None


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "chunked_attention"]])
def test_layer_types_that_do_not_fit_are_named(types: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types is .*full_attention"):
        parse(layer_types=types)


def test_mlx_carries_the_window_and_other_targets_end_before_it(tmp_path: Path) -> None:
    root = checkpoint(tmp_path / "mistral")
    (made,) = build(BuildOptions(str(root), tmp_path / "out", targets=("mlx",), quant="q4", group_size=32))
    model = json.loads((made / "manifest.json").read_text())["model"]
    assert (model["context_length"], model["sliding_window"]) == (160, WINDOW)
    assert model["layer_types"] == ["sliding_attention"] * 2
    config_json = json.loads((made / "config.json").read_text())
    assert config_json["sliding_window"] == WINDOW
    assert "layer_types" not in config_json, "mlx-lm fails where all layers slide"
    source = open_source(BuildOptions(str(root), tmp_path / "out"))
    CPU.check(source, BuildOptions(str(root), tmp_path / "out"))
    within = source.within_window()
    assert within.config.context_length == WINDOW
    assert within.cache.pages_per_slot == 3
    wide = open_source(BuildOptions(str(checkpoint(tmp_path / "wide", sliding_window=4096)), tmp_path / "out"))
    assert wide.within_window() is wide.model


@pytest.mark.parametrize("types", [None, ["full_attention", "sliding_attention"], ["sliding_attention"] * 2])
def test_mlx_lm_loads_it(tmp_path: Path, types: list[str] | None) -> None:
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    changes = {"layer_types": types} if types else {}
    root = checkpoint(tmp_path / "mistral", **changes)
    (made,) = build(BuildOptions(str(root), tmp_path / "out", targets=("mlx",), quant="none"))
    model, _ = mlx_lm.load(str(made))
    mixed = types is not None and "full_attention" in types
    assert [layer.use_sliding for layer in model.layers] == [False, mixed]
