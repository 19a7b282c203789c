"""Untrusted quantized checkpoints: settings and tensors of every format are damaged."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.mlc_directory import listed_entries
from nearfar.errors import NearfarError
from tests.fuzz.effort import effort
from tests.fuzz.mutate import mutants
from tests.support.quantized import Array
from tests.support.quantized_formats import FORMATS, Made

KEYS = (
    "quant_method", "bits", "group_size", "version", "checkpoint_format", "dynamic", "format",
    "config_groups", "sparsity_config", "transform_config", "weight_block_size", "load_in_8bit", "mode",
)  # fmt: skip


@functools.cache
def of(name: str) -> Made:
    """A valid checkpoint, which the tests damage."""
    return FORMATS[name]()


def look(made: Made) -> None:
    """Open the checkpoint and read all its matrices; only our own errors may be raised."""
    with np.errstate(over="ignore", invalid="ignore"):  # the stream of weights ignores these warnings too
        _look(made)


def _look(made: Made) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        root = made.write(folder / "model")
        source = open_source(BuildOptions(str(root), folder / "out", targets=("mlx",)))
        if source.quantized is None:
            return
        for param in source.params:
            for tensor, n in param.tensors.items():
                if tensor not in source.quantized.tensors:
                    continue
                assert source.quantized.weights(tensor, 1, n).shape == (n - 1, param.k)
                if tensor in source.keeps:
                    matrix = source.matrices[param.name]
                    rows = source.quantized.carry(tensor, 1, n).rows
                    assert rows.codes.shape == (n - 1, param.k)
                    if matrix.quantized:
                        assert rows.widened(matrix.bits, matrix.group, param.k).codes.max() < 2**matrix.bits
    except NearfarError:
        pass
    finally:
        shutil.rmtree(folder)


@st.composite
def settings_of_another(draw: st.DrawFn) -> Made:
    """The checkpoint with the settings of another one."""
    made = of(draw(st.sampled_from(sorted(FORMATS))))
    key = "model_config" if made.mlc else "quantization_config"
    changed = draw(mutants(made.config[key], KEYS))
    return replace(made, config={**made.config, key: changed})


@effort(150)
@given(settings_of_another())
def test_settings_are_read_or_refused(made: Made) -> None:
    look(made)


def spoil(array: Array, how: str, seed: int) -> Array:
    """A damaged version of a tensor."""
    rng = np.random.default_rng(seed)
    if how == "bytes":
        raw = rng.integers(0, 256, array.nbytes, np.uint8)
        return raw.view(array.dtype).reshape(array.shape)
    if how == "transposed":
        return np.ascontiguousarray(array.T)
    if how == "short":
        return array[: len(array) // 2] if array.ndim else array
    if how == "flat":
        return array.reshape(-1)
    if how == "bytes as such":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.astype(np.float32) if array.dtype.kind in "iu" else array.astype(np.float16)


@st.composite
def damaged(draw: st.DrawFn) -> Made:
    """The checkpoint with one or two tensors missing or replaced."""
    made = of(draw(st.sampled_from(sorted(FORMATS))))
    tensors: dict[str, Any] = dict(made.tensors)
    inside = sorted(name for name in tensors if "layers.0" in name)
    hows = ("bytes", "transposed", "short", "flat", "bytes as such", "other", "missing")
    for name in draw(st.lists(st.sampled_from(inside), min_size=1, max_size=2, unique=True)):
        how = draw(st.sampled_from(hows))
        if how == "missing":
            del tensors[name]
        else:
            tensors[name] = spoil(tensors[name], how, draw(st.integers(0, 9)))
    return replace(made, tensors=tensors)


@effort(150)
@given(damaged())
def test_damaged_tensors_are_refused_or_harmless(made: Made) -> None:
    look(made)


LISTED = {
    "records": [{
        "dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": 64,
        "records": [{
            "name": "model.norm.weight", "shape": [16], "dtype": "float32", "format": "raw", "nbytes": 64,
            "byteOffset": 0,
        }],
    }],
}  # fmt: skip


@effort(150)
@given(mutants(LISTED, ("metadata",)), st.integers(0, 80))
def test_a_list_of_mlc_stays_within_its_files(changed: dict[str, Any], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "ndarray-cache.json"
        listed.write_text(json.dumps(changed))
        (Path(folder) / "params_shard_0.bin").write_bytes(bytes(size))
        try:
            entries = listed_entries(listed)
        except NearfarError:
            return
        for entry in entries.values():
            assert entry.file.parent == Path(folder)
            assert entry.offset + entry.bytes <= size
