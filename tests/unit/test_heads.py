"""A head in a checkpoint whose config.json ties the head to the embedding: a copy is left out, a different
one is the model's head, as in transformers 5.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nearfar.build.options import BuildOptions
from nearfar.build.pipeline import build
from nearfar.build.source import Source, open_source
from nearfar.errors import CheckpointError
from tests.support import quantized, speaking
from tests.support.architectures import CASES, checkpoint
from tests.support.cases import Case
from tests.support.commands import nearfar
from tests.support.quantized_formats import FORMATS

EMBED, HEAD = "embed_tokens.", "lm_head."
TIED_INSIDE = [case for case in CASES if "text_config" in case.config]


def opened(path: Path) -> Source:
    return open_source(BuildOptions(str(path), path / "out"))


def has_own(source: Source) -> bool:
    """Whether the model has a head of its own, about which there must be a note."""
    own = any(param.name == "lm_head" for param in source.params)
    assert any("lm_head" in note for note in source.notes) == own
    return own


def with_head(tensors: dict[str, Any], differs: bool) -> dict[str, Any]:
    """The tensors with a head that is a copy of the embedding, or differs from it at the end of the
    last row.
    """
    start = "language_model." if any(name.startswith("language_model.model.") for name in tensors) else ""
    out = {name: value for name, value in tensors.items() if HEAD not in name}
    for name in tensors:
        if EMBED in name:
            copy = np.array(tensors[name])
            if differs:
                bits = copy.view(np.uint8)
                bits.reshape(len(copy), -1)[-1, 0] ^= 1
            out[f"{start}{HEAD}{name.partition(EMBED)[2]}"] = copy
    return out


def test_an_artifact_answers_with_the_head_of_the_checkpoint(tmp_path: Path) -> None:
    source, out = speaking.make(tmp_path / "m", config={"tie_word_embeddings": True}), tmp_path / "out"
    done = nearfar("build", source, "--target", "mlx", "--quant", "none", "-o", out)
    assert done.returncode == 0, done.stderr
    assert "lm_head is used, as transformers does" in " ".join(done.stderr.split())
    done = nearfar("run", out, "hello", "--temperature", 0, "--max-tokens", 8)
    assert done.stdout.strip() == "Hi!", done.stderr
    assert json.loads((out / "mlx" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_of_every_format_a_head_that_differs_is_kept(name: str, differs: bool, tmp_path: Path) -> None:
    made = FORMATS[name]()
    inner = made.config["model_config"] if made.mlc else made.config
    inner["tie_word_embeddings"] = True
    write = quantized.write_mlc if made.mlc else quantized.write
    path = write(tmp_path / "m", made.config, with_head(dict(made.tensors), differs))
    assert has_own(opened(path)) == differs


@pytest.mark.parametrize("differs", [False, True])
def test_of_our_own_mlx_target_a_head_that_differs_is_kept(differs: bool, tmp_path: Path) -> None:
    config = {**quantized.CONFIG, "tie_word_embeddings": True}
    source = quantized.write(tmp_path / "m", config, quantized.weights(config))
    (path,) = build(BuildOptions(str(source), tmp_path / "out", ("mlx",), "q4"))
    assert not has_own(opened(path))
    tensors = load_file(path / "model.safetensors")
    assert f"model.{EMBED}scales" in tensors
    save_file(with_head(tensors, differs), path / "model.safetensors")
    assert has_own(opened(path)) == differs


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("case", TIED_INSIDE, ids=str)
def test_of_a_text_model_within_a_larger_one(case: Case, differs: bool, tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(checkpoint(case), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(path / "model.safetensors")
    save_file(with_head(tensors, differs), path / "model.safetensors")
    assert has_own(opened(path)) == differs


def test_a_head_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    path = speaking.make(tmp_path, config={"tie_word_embeddings": True})
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, f"{HEAD}weight": tensors[f"{HEAD}weight"][:-1]}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 misshapen: lm_head\.weight"):
        opened(path)
