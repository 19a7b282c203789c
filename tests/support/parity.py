"""Builds a small artifact of an architecture for a backend, and compares its answers with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.format.adapters import DeviceClass
from nearfar.kernels.buckets import Buckets
from tests.support.architectures import checkpoint, prompt, reference
from tests.support.backends import executor, greedy, kv_dtype, require
from tests.support.cases import Case

Array = npt.NDArray[Any]

TOLERANCE = {"f32": 2e-3, "f16": 2e-2}
"""Largest difference, as a share of the largest logit. float32: other orders of summation, and matmuls in
16-bit fixed point on the cpu.
"""
CACHE_TOLERANCE = 5e-3
"""Tolerance where values are computed in float32, and keys and values are kept in float16."""
ANSWER = 12
SMALL = Buckets((1, 16), (1,))
"""Few buckets, so that little is compiled, with both kinds of matmul."""


@contextmanager
def opened(
    case: Case,
    backend: str,
    folder: Path,
    device_class: DeviceClass = "software",
    buckets: Buckets = SMALL,
) -> Iterator[Engine]:
    """Open an engine of the case on `target` or `target-precision`. It is built in the folder, with programs
    of that precision only.
    """
    require(backend)
    target, _, precision = backend.partition("-")
    options = BuildOptions(
        str(checkpoint(case)),
        folder,
        (target,),
        "none",
        buckets=buckets,
        device_classes=(device_class,),
        context=case.context,
        cpu_features=("native",),
    )
    with only(target, precision):
        build(options)
    with Engine.load(folder / target, kv_memory="4MB", precision=precision or None) as engine:
        yield engine


@contextmanager
def only(target: str, precision: str) -> Iterator[None]:
    """While the block runs, a GPU target makes programs of one precision: the others would cost as much to
    compile.
    """
    if target not in ("webgpu", "vulkan") or not precision:
        yield
        return
    module = import_module(f"nearfar.targets.{target}.target")
    with patch.object(module, "VARIANTS", tuple(v for v in module.VARIANTS if v.precision == precision)):
        yield


def check_answers(case: Case, engine: Engine) -> None:
    """Check that logits are those of transformers in float32, and that each greedy token is as good as its
    best.
    """
    tolerance = TOLERANCE[executor(engine).precision]
    if kv_dtype(engine) == "float16":
        tolerance = max(tolerance, CACHE_TOLERANCE)
    for count in case.prompts:
        tokens = prompt(case, count)[: case.context and case.context - ANSWER]
        answer = greedy(engine, tokens, ANSWER)
        expected = reference(case)([*tokens, *answer])[len(tokens) - 1 : -1]
        close = tolerance * float(np.abs(expected).max())
        found = last(engine)  # the logits that gave the last token
        assert np.abs(found - expected[-1]).max() < close, count
        for step, token in enumerate(answer):
            assert expected[step].max() - expected[step][token] < 2 * close, (count, step)


def last(engine: Engine) -> Array:
    """The logits of the last step."""
    return np.asarray(executor(engine).fetch("logits", 1)()[0])
