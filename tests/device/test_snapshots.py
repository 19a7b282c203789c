"""Snapshots on every executor: after saving, restarting and loading, the tokens are the same as without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearfar.edge_runtime import Engine
from nearfar.errors import SnapshotError
from tests.device.test_backends import text, tolerance
from tests.support.backends import (
    Lab,
    Transformers,
    cached_pages,
    executor,
    forget,
    greedy,
    kv_dtype,
    last_logits,
)


def fresh(lab: Lab, model: str, backend: str) -> Engine:
    """An engine with an empty cache."""
    return lab.open(model, backend, verify=False)


@pytest.fixture(scope="module")
def saved(lab: Lab, stories: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of 300 tokens of stories."""
    path = tmp_path_factory.mktemp("snapshots") / "stories.snap"
    forget(stories)
    assert stories.save_cache(path, tokens=prompt(stories)[:310]).tokens == 304
    return path


def prompt(engine: Engine) -> list[int]:
    return engine.asynchronous.codec.encode(text())[:330]


def test_the_same_tokens_after_a_restart(lab: Lab, stories: Engine, backend: str, saved: Path) -> None:
    tokens = prompt(stories)
    forget(stories)
    cold = greedy(stories, tokens, 60)
    with fresh(lab, "stories", backend) as engine:
        loaded = engine.load_cache(saved)
        assert (loaded.tokens, loaded.page_size) == (304, engine.manifest.cache.page_size)
        made = engine.completions.create(tokens, max_tokens=60, temperature=0, ignore_eos=True)
        assert made.usage.prompt_tokens_details.cached_tokens == 304
        assert greedy(engine, tokens, 60) == cold


def test_pages_come_back_bit_by_bit(lab: Lab, stories: Engine, backend: str, saved: Path) -> None:
    forget(stories)
    tokens = prompt(stories)
    greedy(stories, tokens[:304], 1)
    with fresh(lab, "stories", backend) as engine:
        greedy(engine, list(range(3, 43)), 1)  # another prompt first, so that the prefix lands on other pages
        engine.load_cache(saved)
        contents = []
        for made in (stories, engine):
            found = cached_pages(made, tokens[: 19 * 16])
            assert len(found) == 19
            contents.append(executor(made).read_pages(0, found))
        assert contents[0].keys() == contents[1].keys()
        for name, array in contents[0].items():
            np.testing.assert_array_equal(array, contents[1][name])


def test_pages_hold_the_keys_and_values_of_transformers(
    stories: Engine, stories_reference: Transformers
) -> None:
    """A snapshot means the same to every executor, whatever layout its kernels prefer."""
    tokens = prompt(stories)[:64]
    forget(stories)
    greedy(stories, tokens, 1)
    content = executor(stories).read_pages(0, cached_pages(stories, tokens[:64]))
    torch = pytest.importorskip("torch")
    made = stories_reference.model(torch.tensor([tokens]), use_cache=True).past_key_values
    for layer, reference in enumerate(made.layers):
        for part, expected in (("k", reference.keys), ("v", reference.values)):
            found = np.concatenate(list(content[f"kv.{layer}.{part}"]), axis=1)
            true = expected[0].detach().numpy()
            # Keys reach 16, where numbers of float16 are twice as far apart as those around 8.
            close = tolerance(stories) * max(1.0, float(np.abs(true).max()) / 8)
            assert np.abs(found - true).max() < close, (layer, part)


def test_pages_that_do_not_fit_are_refused(stories: Engine) -> None:
    device = executor(stories)
    content = device.read_pages(0, [0, 1])
    assert {array.shape[0] for array in content.values()} == {2}
    with pytest.raises(ValueError, match="do not fit"):
        device.write_pages(0, [0], content)
    with pytest.raises(ValueError, match="do not fit"):
        device.write_pages(0, [0, 1], {name: array for name, array in content.items() if "kv.0." not in name})


def test_a_snapshot_of_another_model_or_quantization_is_refused(
    lab: Lab, classics: Engine, backend: str, saved: Path
) -> None:
    with pytest.raises(
        SnapshotError, match=r"made with stories260K \(not quantized.*this model is classics-7M \(q4"
    ):
        classics.load_cache(saved)


def test_a_snapshot_of_the_cpu_serves_every_cache_of_float16(
    lab: Lab, backend: str, stories: Engine, tmp_path: Path
) -> None:
    """A snapshot has float16 keys and values. A float32 cache rejects them, since it computes more
    precisely.
    """
    if backend == "cpu":
        pytest.skip("cpu is where it comes from")
    tokens = prompt(stories)
    lab.engine("stories", "cpu").save_cache(tmp_path / "a.snap", tokens=tokens)
    forget(stories)
    if kv_dtype(stories) == "float32":
        with pytest.raises(SnapshotError, match="saved from a float16 cache, this one is float32"):
            stories.load_cache(tmp_path / "a.snap")
        return
    cold = last_logits(stories, tokens)
    forget(stories)
    stories.load_cache(tmp_path / "a.snap")
    made = stories.completions.create(tokens, max_tokens=1)
    assert made.usage.prompt_tokens_details.cached_tokens == 320
    assert np.abs(last_logits(stories, tokens) - cold).max() < tolerance(stories)
