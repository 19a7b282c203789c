"""Untrusted checkpoints: headers of weights, configs, tokenizer settings."""

from __future__ import annotations

import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.headers import read_header
from nearfar.errors import CheckpointError, NearfarError
from nearfar.step.model import op_of, op_record
from nearfar.step.models import architectures
from nearfar.step.ops import Norm
from nearfar.step.reading import read_model
from tests.fuzz.effort import effort
from tests.fuzz.mutate import mutants
from tests.unit.test_config import BASE, LLAMA3

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sample-model"
CONFIG = {
    **{key: value for key, value in BASE.items() if key != "model_type"},
    "rope_theta": 10000.0,
    "rope_scaling": LLAMA3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [1, 2],
    "bos_token_id": 0,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"],
}
KEYS = (
    "model_type",
    "partial_rotary_factor",
    "rope_parameters",
    "head_dim",
    "use_sliding_window",
    "max_window_layers",
    "hidden_act",
)


@effort(300)
@given(mutants(CONFIG, KEYS), st.sampled_from(architectures()))
def test_a_config_is_refused_or_makes_sense(changed: dict[str, Any], model_type: str) -> None:
    try:
        made = read_model({"model_type": model_type, **changed}).model
    except CheckpointError:
        return
    assert all(0 <= token < made.vocab_size for token in made.eos_token_ids)
    assert 1 <= len(made.step.caches) <= 4096
    for rope in made.step.ropes.values():
        frequencies = np.array(rope.inv_freq, np.float32)
        assert np.isfinite([*frequencies, rope.scale]).all()
        assert (frequencies >= 0).all()
    assert all(np.float32(op.eps) > 0 for op in made.step.ops if isinstance(op, Norm))
    assert [op_of(op_record(op)) for op in made.step.ops] == list(made.step.ops)


A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": A,
    "b": B,
    "c": {"dtype": "F32", "shape": [0], "data_offsets": [32, 32]},
}


@effort(300)
@given(
    mutants(HEADER).map(json.dumps) | st.text(max_size=40),
    st.integers(0, 40) | st.just(32),
    st.integers(-3, 3) | st.just(0),
)
def test_a_header_that_safetensors_refuses_is_refused(header: str, count: int, more: int) -> None:
    text = header.encode("utf-8", "surrogatepass")
    data = max(0, len(text) + more).to_bytes(8, "little") + text + bytes(count)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(data)
        try:
            entries = read_header(file)
        except CheckpointError:
            return
    assert (
        sum(entry.bytes for entry in entries.values())
        == entry_bytes(entries)
        == len(data) - 8 - len(text) - more
    )
    try:
        deserialize(data)
    except SafetensorError as error:
        pytest.fail(f"safetensors refuses this header: {error}")


def entry_bytes(entries: dict[str, Any]) -> int:
    """Bytes that the tensors need by their shapes and dtypes."""
    return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries.values())


@functools.cache
def model() -> Path:
    """A valid checkpoint, which the tests damage."""
    return Path(shutil.copytree(SAMPLE, Path(tempfile.mkdtemp()) / "model"))


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of the checkpoint with other content: other values, other bytes, or something unrelated."""
    name = draw(st.sampled_from(FILES))
    path = SAMPLE / name
    document = (
        json.loads(path.read_text())
        if path.exists() and name != "tokenizer.json"
        else {"weight_map": {"a": "b"}}
    )
    keys = ("chat_template", "bos_token", "eos_token_id", "quantization", "quantization_config")
    text = draw(mutants(document, keys).map(json.dumps) | st.text(max_size=20) | st.just("[" * 50_000))
    data = text.encode("utf-8", "surrogatepass")
    cut = draw(st.integers(0, len(data)))
    return name, data if draw(st.booleans()) else data[:cut] + draw(st.binary(max_size=3)) + data[cut + 1 :]


@effort(100)
@given(spoiled())
def test_the_front_of_a_build_takes_it_or_says_why(change: tuple[str, bytes]) -> None:
    name, data = change
    root = model()
    before = (root / name).read_bytes() if (root / name).exists() else None
    try:
        (root / name).write_bytes(data)
        source = open_source(BuildOptions(str(root), root / "out", targets=("mlx",)))
        assert source.model.step.caches
    except NearfarError:
        pass
    finally:
        (root / name).unlink()
        if before is not None:
            (root / name).write_bytes(before)
