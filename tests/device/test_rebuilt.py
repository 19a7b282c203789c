"""An artifact that replaced another one at its path is the one that runs, also in the same process."""

from __future__ import annotations

from pathlib import Path

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from tests.support import quantized
from tests.support.backends import greedy

PROMPT, ANSWER = (72, 101, 108, 108, 111), 12


def test_a_library_built_anew_at_its_place_is_loaded(tmp_path: Path) -> None:
    """For a path that it knows, the loader of shared libraries returns the library that it loaded there
    before.
    """
    found = []
    for inner in (192, 96, 192):
        config = {**quantized.CONFIG, "intermediate_size": inner}
        weights = quantized.weights(config)
        path = quantized.write(tmp_path / f"m{len(found)}", config, weights)
        options = BuildOptions(
            str(path), tmp_path / "out", ("cpu",), "none", buckets=quantized.SMALL, cpu_features=("native",)
        )
        (root,) = build(options)
        for _ in range(2):
            with Engine.load(root, kv_memory="4MB") as engine:
                found.append(greedy(engine, PROMPT, ANSWER))
        assert found[-1] == found[-2] == quantized.greedy(weights, config)
    assert found[0] == found[-1] != found[2]
