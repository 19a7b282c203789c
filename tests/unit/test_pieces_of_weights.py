"""Rows of a tensor are written in the order that a model's file gives them, on every target: in another order
than stored, apart, or twice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearfar.build.calibration.solve import FloatWeights
from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.targets import target_of
from nearfar.build.weights.stream import WeightStream
from nearfar.step import decoder
from nearfar.step.decoder import Attention
from nearfar.step.params import Param, RotaryOrder, TensorPiece
from tests.support import quantized, tiny

ROWS = 24
ORDER = RotaryOrder(4, 2, interleaved=True)
CASES = {
    "as they lie": (TensorPiece("a", 8), TensorPiece("a", 16, 8)),
    "in another order": (TensorPiece("a", 8, 16), TensorPiece("a", 8), TensorPiece("a", 8, 8)),
    "of two tensors by turns": (
        TensorPiece("a", 4),
        TensorPiece("b", 4),
        TensorPiece("a", 20, 4),
        TensorPiece("b", 4, 4),
    ),
    "the last alone": (TensorPiece("a", 4, 20),),
    "used twice": (TensorPiece("a", 8), TensorPiece("a", 8, 16), TensorPiece("a", 8)),
    "turned, and in another order": (
        TensorPiece("a", 8, 16, ORDER),
        TensorPiece("b", 4),
        TensorPiece("a", 8, 0, ORDER),
    ),
}


@pytest.mark.parametrize("pieces", CASES.values(), ids=CASES)
def test_rows_come_where_they_are_put(pieces: tuple[TensorPiece, ...]) -> None:
    tensors = {name: np.arange(ROWS, dtype=np.float32) + 100 * (name == "b") for name in "ab"}
    expected = []
    for piece in pieces:
        part = tensors[piece.tensor][piece.start : piece.start + piece.rows]
        expected.append(part if piece.order is None else part[piece.order.rows(piece.rows)])
    param = Param("v", pieces)
    stacked = np.concatenate([tensors[name][:rows] for name, rows in param.tensors.items()])
    assert np.array_equal(param.folded(stacked), np.concatenate(expected))
    assert FloatWeights.stacked(param, tensors).tolist() == np.concatenate(expected).tolist()


CONFIG = {**tiny.CONFIG, "model_type": "phi3", "hidden_size": 64, "head_dim": 16, "pad_token_id": 0}
HEAD = 16


def joined(path: Path, by_turns: bool) -> Path:
    """A checkpoint with q, k and v in one tensor: one after the other, or with v first and q's first head
    last.
    """
    plain = tiny.weights(CONFIG)
    out = {name: value for name, value in plain.items() if "_proj" not in name or "o_proj" in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        q, k, v = (plain[f"{at}.self_attn.{part}_proj.weight"] for part in "qkv")
        rows = (v, q[HEAD:], k, q[:HEAD]) if by_turns else (q, k, v)
        out[f"{at}.self_attn.qkv_proj.weight"] = np.concatenate(rows)
        gate_up = (plain[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        out[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(list(gate_up))
        out[f"{at}.mlp.down_proj.weight"] = plain[f"{at}.mlp.down_proj.weight"]
    return quantized.write(path, CONFIG, out)


def qkv_by_turns(a: Attention, source: str, q: int, kv: int) -> list[TensorPiece]:
    """The rows of q, k and v in such a tensor."""
    name = f"{source}.{a.names[0]}.weight"
    places = ((kv + q - HEAD + kv, HEAD), (kv, q - HEAD), (kv + q - HEAD, kv), (0, kv))
    return [TensorPiece(name, rows, start, a.order) for start, rows in places]


def written(checkpoint: Path, target: str, root: Path) -> dict[str, bytes]:
    """The weights as a target's writer stores them."""
    options = BuildOptions(str(checkpoint), root, (target,), "q4", 32)
    source = open_source(options).held_by(target, target_of(target).held)
    root.mkdir()
    with target_of(target).writer(source, root, options) as writer:
        stream = WeightStream(source.params, source.matrices, source.checkpoint, None, (), source.report)
        stream.write([writer], lambda done: None)
        writer.finish()
    return {file.name: file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.mark.parametrize("target", ["cpu", "webgpu", "vulkan", "onnx"])
def test_weights_are_the_same_however_a_tensor_joins_them(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(joined(tmp_path / "plain", by_turns=False), target, tmp_path / "a")
    assert sum(map(len, expected.values())) > 10_000
    path = joined(tmp_path / "turns", by_turns=True)
    monkeypatch.setattr(decoder, "_qkv", qkv_by_turns)
    assert written(path, target, tmp_path / "b") == expected
