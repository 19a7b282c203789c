"""Makes llama.cpp's types with its own llama-quantize, with or without llama-imatrix's importances."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np

from nearfar.build.weights.gguf.names import pair_rows
from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantize import to_float32
from peers.gguf_model import _add_shape, _add_tokenizer, _head_dim
from peers.llama_convert import gguf_name
from peers.quantized import Quantized

PAIRED = ("q_proj", "k_proj")
"""Matrices that GGUF files of the llama architecture store with the two rows of a rotated pair side by side.
"""
SPLITS = {"llama": "gpt-2", "qwen2": "qwen2"}
"""llama.cpp's name of how a tokenizer splits text into words, by the architectures that are written here."""


def make(model: Path, text: Path, tools: str, type: str, imatrix: bool, keep: str | None = None) -> Quantized:
    """Quantize with llama.cpp. `tools`: the folder of llama-quantize and llama-imatrix; `type`: such as
    Q4_K_M; `keep`: a folder of one model and one text, where its GGUF file in float32 and its importances
    stay for further types.
    """
    for tool in ("llama-quantize", "llama-imatrix")[: 1 + imatrix]:
        if not (Path(tools) / tool).exists():
            raise SystemExit(
                f"no {tool}: build it of llama.cpp's sources and give its folder with --llama-tools"
            )
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "quantized.gguf"
        folder = Path(keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "f32.gguf"
        if not source.exists():
            _write(model, source)
        command = [f"{tools}/llama-quantize"]
        if imatrix:
            measured = folder / "imatrix.gguf"
            if not measured.exists():
                _run([f"{tools}/llama-imatrix", "-m", source, "-f", text, "-o", measured, "-c", 512, "-t", 1])
            command += ["--imatrix", str(measured)]
        _run([*command, source, output, type, 1])
        return _read(model, output)


def _run(command: list[object]) -> None:
    """Run a tool; SystemExit with its last line where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise SystemExit((done.stderr or done.stdout).strip().splitlines()[-1])


def _write(model: Path, output: Path) -> None:
    """Write a checkpoint of an architecture of SPLITS as a GGUF file in float32."""
    source = open_checkpoint(model)
    config = {**source.config, "rope_theta": source.config["rope_parameters"]["rope_theta"]}
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(output, architecture)
    _add_shape(writer, config)
    _add_tokenizer(writer, config, json.loads(source.tokenizer_json), SPLITS[architecture])
    for name in source.shapes:
        weight = to_float32(source.read(name))
        if rows := _order(name, config, len(weight)):
            paired = np.empty_like(weight)
            paired[rows[0]] = weight
            weight = paired
        writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _order(name: str, config: dict[str, object], rows: int) -> tuple[np.ndarray] | None:
    """The order of the rows of q and k in the file; None for matrices with the checkpoint's order."""
    if config["model_type"] != "llama" or name.split(".")[-2] not in PAIRED:
        return None
    return (pair_rows(0, rows, _head_dim(config)),)


def _read(model: Path, file: Path) -> Quantized:
    """The weights of a file, by the gguf package's own reading of its blocks."""
    source = open_checkpoint(model)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    weights = {}
    for name, shape in source.shapes.items():
        tensor = tensors[gguf_name(name)]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        order = _order(name, dict(source.config), shape[0])
        weights[name] = weight if order is None else weight[order[0]]
    return Quantized(weights, sum(tensor.n_bytes for tensor in tensors.values() if len(tensor.shape) == 2))
