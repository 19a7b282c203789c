"""Windows on devices: texts equal those of transformers beyond the window, pages are bounded, the context is
not cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.cli.inspect import describe
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.budget import page_bytes
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.buckets import Buckets
from tests.support.architectures import checkpoint, prompt, reference
from tests.support.backends import executor, forget, greedy, require
from tests.support.cases import Case, case
from tests.support.parity import only
from tests.support.turns import paired

WINDOW, CONTEXT = 32, 32768
EVERYWHERE = case("mistral", "windows", sliding_window=WINDOW, max_position_embeddings=CONTEXT)
HYBRID = case(
    "ministral", "windows", sliding_window=WINDOW, max_position_embeddings=CONTEXT,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip
BOTH = (1, 256)
TOLERANCE = 2e-3
"""Largest difference, as a share of the largest logit: targets sum in different orders."""


CASES = (EVERYWHERE, HYBRID)
Place = tuple[str, Case, tuple[int, ...]]
"""A backend, a model, and the rows that the model's steps can have."""
FEW, MANY = BOTH[:1], BOTH[1:]
ON_GPUS = ((EVERYWHERE, FEW), (HYBRID, MANY), (EVERYWHERE, MANY), (HYBRID, FEW))
PLACES: list[Place] = [
    *((backend, model, BOTH) for backend in ("cpu", "mlx") for model in CASES),
    *((backend, *of) for backend, of in paired(("webgpu-f32", "vulkan-f32"), ON_GPUS)),
]
"""A software GPU takes 7 CPU seconds to compile steps of one size, so in each run it gets one size of one
model.
"""


def named(place: Place) -> str:
    backend, model, rows = place
    return "-".join(map(str, (backend, model, *rows)))


@pytest.fixture(scope="module", params=PLACES, ids=named)
def place(request: pytest.FixtureRequest) -> Place:
    made: Place = request.param
    require(made[0])
    return made


@pytest.fixture(scope="module")
def model(place: Place) -> Case:
    return place[1]


@pytest.fixture(scope="module")
def artifact(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend, model, rows = place
    target = backend.partition("-")[0]
    out = tmp_path_factory.mktemp(str(model))
    options = BuildOptions(
        str(checkpoint(model)), out, (target,), quant="none", buckets=Buckets(rows, (1,)),
        device_classes=("software",), cpu_features=("native",),
    )  # fmt: skip
    with only(target, "f32"):
        build(options)
    return out / target


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with Engine.load(artifact, kv_memory="32MB", precision="f32") as made:
        yield made


def most_held(engine: Engine, tokens: list[int], count: int) -> tuple[list[int], list[int]]:
    """An answer, and the most pages that each group held meanwhile."""
    table = engine.asynchronous.core.scheduler.table
    answer, most = [], [0] * len(table.windows)
    for event in engine.generate(tokens, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)):
        answer.append(event.token)
        for group, allocator in enumerate(table.allocators):
            most[group] = max(most[group], sum(refs > 0 for refs in allocator.refs))
    return answer, most


@pytest.mark.parametrize("length", [20, 100, 300])
def test_the_text_is_that_of_transformers_and_pages_are_bounded(
    engine: Engine, model: Case, length: int
) -> None:
    tokens = prompt(model, length)
    answer, most = most_held(engine, tokens, 24)
    expected = reference(model)([*tokens, *answer])[len(tokens) - 1 : -1]
    for step, token in enumerate(answer):
        assert expected[step].max() - expected[step][token] < TOLERANCE * float(np.abs(expected).max()), step
    window = engine.asynchronous.core.scheduler.table.windows[-1]
    assert window.size == WINDOW
    assert most[-1] <= window.most_columns(2 * 256, CONTEXT)
    assert engine.asynchronous.core.context == CONTEXT


def test_a_prefix_is_found_again_and_gives_the_same_text(engine: Engine, model: Case) -> None:
    tokens = prompt(model, 300)
    forget(engine)
    expected = greedy(engine, tokens, 12)
    assert greedy(engine, tokens, 12) == expected
    generation = engine.asynchronous.core.scheduler.table.index.lookup(tokens, 18)
    assert len(generation) == 18, "the last pages of the window are still there"


def test_memory_by_context_grows_only_where_there_is_no_window(artifact: Path, model: Case) -> None:
    caches = describe(artifact)["cache"]
    cache = next(
        (of for program, of in caches.items() if program.endswith("f32")), next(iter(caches.values()))
    )
    assert list(cache) == ["1024", "4096", "8192", "32768"]
    layers, sliding = 3, 3 if model is EVERYWHERE else 2
    width = 2 if artifact.name == "cpu" else 4  # bytes of float16 and float32
    page = 2 * 2 * 16 * width * 16  # keys and values, heads, head_dim, bytes, tokens
    held = -(-(WINDOW - 1 + MAX_STEP - 1) // 16) + 1  # while a prompt is computed in the largest steps
    assert cache == {
        str(n): page * ((layers - sliding) * n // 16 + sliding * held) for n in (1024, 4096, 8192, 32768)
    }


@pytest.mark.parametrize("place", [("cpu", model, BOTH) for model in CASES], indirect=True, ids=named)
def test_a_text_goes_on_past_8k_positions_in_a_cache_of_little_more_than_its_windows(
    artifact: Path, model: Case, engine: Engine
) -> None:
    manifest = engine.manifest
    each, table = page_bytes(manifest, manifest.programs[0]), engine.asynchronous.core.scheduler.table
    columns = [520 if window.size is None else window.most_columns(256, CONTEXT) for window in table.windows]
    small = sum(size * count for size, count in zip(each, columns, strict=True))
    tokens = prompt(model, 8200)
    with Engine.load(artifact, kv_memory=small, precision="f32") as made:
        assert made.asynchronous.core.context >= 520 * 16
        answer, most = most_held(made, tokens, 40)
        found = np.asarray(executor(made).fetch("logits", 1)()[0])
    assert len(answer) == 40
    assert [held <= count for held, count in zip(most, columns, strict=True)] == [True] * len(columns)
    expected = reference(model, "sdpa")([*tokens, *answer])[len(tokens) - 1 : -1]
    close = TOLERANCE * float(np.abs(expected).max())
    assert np.abs(found - expected[-1]).max() < close
    for step, token in enumerate(answer):
        assert expected[step].max() - expected[step][token] < 2 * close, step
