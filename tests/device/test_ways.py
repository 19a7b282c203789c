"""A calibrated build for cpu, whose matrices are stored in the way that loses least: built and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nearfar.build.calibration.quality import refined, with_storable
from nearfar.build.calibration.text import calibration_text
from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.targets import target_of
from nearfar.build.weights.quantize import Scheme, dequantize, quantize
from nearfar.build.weights.ways import way
from tests.support.packed import CONFIG, answer, greedy, weights, write

WIDE = {**CONFIG, "hidden_size": 256, "head_dim": 64}


def test_a_calibrated_artifact_answers_as_its_weights_say(tmp_path: Path) -> None:
    """Rows of 256 inputs get two levels, rows of 192 what loses least of the others; transformers computes
    with the weights that the codes and both levels stand for.
    """
    floats = weights(WIDE)
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, np.random.default_rng(0).integers(32, 127, 6000))), encoding="utf-8")
    root = write(tmp_path / "model", WIDE, floats)
    asked = {"quant": "q4", "quality": "good", "calibrate": text}
    found, manifest = answer(root, tmp_path / "out", **asked)
    stored = {matrix["name"]: matrix for matrix in manifest["quantization"]["matrices"]}
    assert manifest["version"] == 4
    assert stored["layers.0.qkv"]["scales"] == {"bits": 6, "superblock": 256}

    options = BuildOptions(str(root), tmp_path, ("cpu",), **asked)
    source = with_storable(options, open_source(options), {"cpu": target_of("cpu").held})
    source, solved = refined(options, source, calibration_text(options, source), lambda *_: None)
    assert solved is not None
    used = dict(floats)
    for param in source.params:
        matrix = source.matrices.get(param.name)
        if matrix is None or not matrix.quantized:
            continue
        scheme = Scheme(matrix.bits, matrix.group, matrix.scales)
        for name in param.tensors:
            tensor = solved[name] if name in solved else quantize(floats[name], scheme, name)
            used[name] = dequantize(tensor, matrix.group, matrix.scales)
    assert {way(m.scales) for m in source.matrices.values() if m.k == 256} == {"levels"}
    assert found == greedy(used, WIDE)
