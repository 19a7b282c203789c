"""Features that only the mlx executor has: windows, quantized caches, in-place updates, files, errors."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime import Engine, SamplingParams
from nearfar.errors import ArtifactError, DeviceError, OutOfMemory, RequestError
from tests.shared_data import shared_data
from tests.support import tiny
from tests.support.backends import Lab, executor, forget, greedy, last_logits
from tests.support.mlx_artifact import Direct, change_weights, write_mlx_artifact

mx = pytest.importorskip("mlx.core", reason="needs MLX (pip install 'nearfar[mlx]')")

from nearfar.edge_runtime.executors.mlx.calls import whole  # noqa: E402
from nearfar.edge_runtime.executors.mlx.device import guard  # noqa: E402
from nearfar.edge_runtime.executors.mlx.rope import Rotator  # noqa: E402
from nearfar.edge_runtime.executors.mlx.weights import MlxMatrix, join  # noqa: E402

CONFIG: dict[str, Any] = {**tiny.CONFIG, "max_position_embeddings": 640}
WIDE: dict[str, Any] = {**CONFIG, "hidden_size": 128, "head_dim": 32, "intermediate_size": 160}
"""A config with heads wide enough for a quantized cache."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlx_artifact(tmp_path_factory.mktemp("mlx") / "plain", CONFIG, tiny.weights(CONFIG))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlx_artifact(tmp_path_factory.mktemp("mlx") / "wide", WIDE, tiny.weights(WIDE))


@pytest.fixture(scope="module")
def roomy(plain: Path) -> Iterator[Engine]:
    with Engine.load(plain, kv_memory="16MB") as engine:
        yield engine


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return list(np.random.default_rng(seed).integers(0, 256, count).tolist())


def test_a_sequence_may_lie_in_any_pages(plain: Path) -> None:
    tokens, direct = some_tokens(520), Direct(plain)
    direct.pages(list(range(40)))
    expected = [direct.prefill(tokens), direct.step([7], 520)]
    for pages in (list(range(127, 87, -1)), [*range(50, 60), *range(0, 30)]):
        direct.pages(pages, slot=1)
        np.testing.assert_allclose(direct.prefill(tokens, slot=1), expected[0], atol=1e-4)
        np.testing.assert_allclose(direct.step([7], 520, slot=1), expected[1], atol=1e-4)


def test_the_cache_grows_and_keeps_what_it_holds(plain: Path) -> None:
    direct, tokens = Direct(plain, pages=300), some_tokens(100)
    direct.pages(list(range(10)))
    before = direct.device.memory_used()
    direct.prefill(tokens)
    expected = direct.step([9], 100)
    direct.pages(list(range(250, 260)), slot=1)
    direct.prefill(tokens, slot=1)  # far beyond the cache's first pages
    assert direct.device.memory_used() > before
    np.testing.assert_array_equal(direct.step([9], 100), expected)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_pages_can_be_read_written_and_copied(wide: Path, kv_bits: int | None) -> None:
    direct, tokens = Direct(wide, kv_bits=kv_bits), some_tokens(48)
    direct.pages([3, 4, 5, 6])
    direct.prefill(tokens)
    expected = direct.step([9], 48)
    content = direct.device.read_pages(0, [3, 4, 5])
    names = {"kv.0.k"} if kv_bits is None else {f"kv.0.k.{part}" for part in ("codes", "scales", "biases")}
    assert names <= content.keys()
    assert all(array.shape[:3] == (3, 2, 16) for array in content.values())
    direct.device.write_pages(0, [20, 90, 22], content)
    direct.device.copy_page(0, 90, 21)
    direct.pages([20, 21, 22, 30], slot=1)
    np.testing.assert_array_equal(direct.step([9], 48, slot=1), expected)
    with pytest.raises(ValueError, match="do not fit the cache"):
        direct.device.write_pages(0, [1], content)


def test_no_step_copies_the_cache(tmp_path: Path) -> None:
    """An array that is replaced gives its memory to the new one; otherwise every token would copy
    the cache.
    """
    config = {**CONFIG, "max_position_embeddings": 8192}
    with Engine.load(
        write_mlx_artifact(tmp_path / "long", config, tiny.weights(config)), kv_memory="64MB"
    ) as engine:
        cache = executor(engine)._cache  # type: ignore[attr-defined]
        cache.hold(0, cache.layout.pages[0] * 16 - 1)
        one = min(array.nbytes for array in cache.arrays)
        assert one > 8e6  # prompts of 256 rows need about 3 MB of their own
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda seed: greedy(engine, some_tokens(300, seed), 40), range(3)))
        options: dict[str, Any] = {"temperature": 0.9, "seed": 1, "max_tokens": 20, "presence_penalty": 0.5}
        engine.completions.create("and so", **options)
        assert mx.get_peak_memory() - base < one


def test_a_layer_costs_the_host_few_calls(tmp_path: Path) -> None:
    """Everything that the list of a model leaves open is decided at load: the host's work is most of the time
    of a token of a small model.

    A layer of Llama calls 63 Python functions; it was 100 when each step decided what to cut and join.
    """
    calls = []
    for layers in (2, 5):
        config = {**CONFIG, "num_hidden_layers": layers}
        direct = Direct(write_mlx_artifact(tmp_path / str(layers), config, tiny.weights(config)))
        direct.pages([0])
        direct.step([1], 0)
        calls.append(_python_calls(partial(direct.device.run, "step", 1)))
    assert (calls[1] - calls[0]) / 3 <= 70


def _python_calls(function: Callable[[], object]) -> int:
    """The number of calls of functions written in Python."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_small_cache_gives_the_texts_of_a_large_one(plain: Path, roomy: Engine) -> None:
    """Requests evict each other's pages, share beginnings and are computed again: LRU, fork, copy
    on write.
    """
    common = some_tokens(50)
    prompts = [common + some_tokens(10 + 9 * i, i) for i in range(6)]
    each = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def ask(engine: Engine, prompt: list[int]) -> list[int]:
        return [event.token for event in engine.generate(prompt, each)]

    expected = [ask(roomy, prompt) for prompt in prompts]
    page = 2 * 2 * 2 * 8 * 4 * 16  # bytes: k and v, layers, heads, values, float32, tokens
    with Engine.load(plain, kv_memory=24 * page) as engine:
        assert engine.asynchronous.core.scheduler.table.allocators[0].count == 24
        with ThreadPoolExecutor(6) as pool:
            for _ in range(2):
                assert list(pool.map(lambda prompt: ask(engine, prompt), prompts)) == expected


def test_one_prompt_in_parts_reaches_the_logits_of_one_pass(roomy: Engine) -> None:
    """Tests truncation: the second prompt is the beginning of the first one."""
    tokens = some_tokens(300)
    forget(roomy)
    whole, half = last_logits(roomy, tokens), last_logits(roomy, tokens[:140])
    forget(roomy)
    np.testing.assert_allclose(last_logits(roomy, tokens[:140]), half, atol=1e-4)
    np.testing.assert_allclose(last_logits(roomy, tokens), whole, atol=1e-4)


@pytest.mark.parametrize("kinds", ["all sliding", "every other"])
def test_sliding_windows_are_those_of_transformers(tmp_path: Path, kinds: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    alternate = kinds == "every other"
    kind = {"model_type": "qwen2" if alternate else "mistral", "tie_word_embeddings": False}
    shape = {
        "vocab_size": 261, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 640, "rope_theta": 10000.0,
        "sliding_window": 37, "rms_norm_eps": 1e-5, "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    torch.manual_seed(0)
    if alternate:
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        shape["hidden_size"] = shape.pop("head_dim") * 4  # this class assumes this head_dim
        shape |= {"layer_types": types, "use_sliding_window": True, "max_window_layers": 0}
        made = transformers.Qwen2Config(**shape)
        reference = transformers.Qwen2ForCausalLM(made)
    else:
        reference = transformers.MistralForCausalLM(transformers.MistralConfig(**shape))
    reference = reference.eval()
    for parameter in reference.parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 1)
    weights = {name: value.numpy() for name, value in reference.state_dict().items()}
    path = write_mlx_artifact(tmp_path / "window", {**shape, **kind}, weights)
    tokens = some_tokens(300)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    with Engine.load(path, kv_memory="16MB") as engine:
        for length in (1, 16, 36, 37, 38, 39, 64, 100, 257, 300):
            forget(engine)
            assert np.abs(last_logits(engine, tokens[:length]) - expected[length - 1]).max() < 2e-3
        for length in (20, 38, 60, 290):  # the second prefill reads what the first one left in the cache
            assert np.abs(last_logits(engine, tokens[:length]) - expected[length - 1]).max() < 2e-3
        with torch.no_grad():
            made = list(tokens[:30])
            for _ in range(30):  # greedy decode across the window's edge
                made.append(int(reference(torch.tensor([made])).logits[0, -1].argmax()))
        assert greedy(engine, tokens[:30], 30) == made[30:]


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.1), (4, 0.8)])
def test_a_quantized_cache_stays_close(lab: Lab, bits: int, tolerance: float) -> None:
    """Differences measured on classics-7M q4 up to 700 positions with logits up to 13: 0.04 with 8 bits, 0.37
    with 4.
    """
    exact = lab.engine("q4", "mlx")
    words = shared_data("text", "heldout.txt").read_text(encoding="utf-8")[:3000]
    tokens = exact.asynchronous.codec.encode(words)[:400]
    with Engine.load(lab.artifact("q4", "mlx"), kv_memory="16MB", kv_bits=bits) as quantized:
        for length in (50, 400):
            away = np.abs(last_logits(quantized, tokens[:length]) - last_logits(exact, tokens[:length])).max()
            assert 0 < away < tolerance
        if bits == 8:
            assert greedy(quantized, tokens[:200], 40) == greedy(exact, tokens[:200], 40)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_cache_may_lie_in_any_pages(wide: Path, bits: int) -> None:
    tokens, direct = some_tokens(330), Direct(wide, kv_bits=bits)
    direct.pages(list(range(40)))
    expected = [direct.prefill(tokens), direct.step([5], 330)]
    direct.pages(list(range(126, 46, -2)), slot=1)
    np.testing.assert_allclose(direct.prefill(tokens, slot=1), expected[0], atol=1e-3)
    np.testing.assert_allclose(direct.step([5], 330, slot=1), expected[1], atol=1e-3)


def test_a_quantized_cache_holds_more_pages(wide: Path) -> None:
    counts = []
    for bits in (None, 8, 4):
        with Engine.load(wide, kv_memory="1MB", kv_bits=bits) as engine:
            table = engine.asynchronous.core.scheduler.table
            cache = executor(engine)._cache  # type: ignore[attr-defined]
            counts.append(table.allocators[0].count)
            cache.hold(0, table.allocators[0].count * 16 - 1)
            assert 0.9e6 < cache.nbytes <= 1e6
            assert len(greedy(engine, some_tokens(40), 20)) == 20
    assert counts[1] > 3 * counts[0]
    assert counts[2] > 5 * counts[0]


def test_kv_bits_are_refused_where_they_cannot_be(plain: Path) -> None:
    with pytest.raises(RequestError, match="heads of 8 values"):
        Engine.load(plain, kv_bits=8)
    with pytest.raises(RequestError, match="mlx cannot keep the KV cache in 5 bits"):
        Engine.load(plain, kv_bits=5)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_both_rotations_are_the_same(scale: float) -> None:
    rng = np.random.default_rng(0)
    x, positions = mx.array(rng.normal(0, 1, (7, 3, 16)).astype(np.float32)), rng.integers(0, 2000, 7)
    frequencies = (1 / 10000 ** (np.arange(0, 16, 2) / 16)).astype(np.float32).tolist()
    kernel, tables = (
        Rotator(frequencies, scale, mx.float32, fused).turn(positions)(x) for fused in (True, False)
    )
    np.testing.assert_allclose(np.array(kernel), np.array(tables), atol=1e-3)  # float32 angles up to 2000


def test_matrices_of_different_kinds_are_joined() -> None:
    rng = np.random.default_rng(0)
    dense = [mx.array(rng.normal(0, 1, (n, 64)).astype(np.float32)) for n in (8, 16, 8)]
    x = mx.array(rng.normal(0, 1, (3, 64)).astype(np.float32))
    coded = [MlxMatrix(*mx.quantize(w, group_size=64, bits=8), bits=8, group_size=64) for w in dense]
    expected = np.concatenate([np.array(matrix(x)) for matrix in coded], -1)
    assert len(join(coded).matrices) == 1
    np.testing.assert_allclose(np.array(whole(join(coded)(x))), expected, atol=1e-5)
    mixed = join([coded[0], MlxMatrix(dense[1]), coded[2]])
    assert len(mixed.matrices) == 3
    assert np.abs(np.array(whole(mixed(x))) - expected).max() < 0.2


def test_what_the_files_lack_or_have_too_much_is_named(tmp_path: Path) -> None:
    paths = [write_mlx_artifact(tmp_path / name, CONFIG, tiny.weights(CONFIG)) for name in ("more", "less")]
    with pytest.raises(ArtifactError, match=r"tensors that its step does not: model\.odd"):
        Engine.load(change_weights(paths[0], add={"model.odd": np.ones(3, np.float32)}))
    with pytest.raises(ArtifactError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is not there"):
        Engine.load(change_weights(paths[1], lose=["model.layers.1.mlp.up_proj.weight"]))


def test_a_config_edited_by_hand_is_refused(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.05}))
    with pytest.raises(ArtifactError, match=r"config.json is "):
        Engine.load(copy)


def test_without_mlx_the_extra_is_named(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(DeviceError, match=r"pip install 'nearfar\[mlx\]'"):
        Engine.load(plain, device="mlx")


def test_a_failure_of_mlx_is_an_error_for_users(plain: Path) -> None:
    with Engine.load(plain, kv_memory="1MB") as engine:
        made = executor(engine)

        def fail(*_: Any) -> None:
            raise RuntimeError("[METAL] Command buffer execution failed")

        made._model.step = fail  # type: ignore[attr-defined]
        with pytest.raises(DeviceError, match=r"of weights and cache held: .*Command buffer.*--kv-memory"):
            greedy(engine, [1, 2, 3], 3)
    made.close()
    assert made.memory_used() == 0


def test_a_cache_beyond_memory_is_refused_before_it_is_made(plain: Path) -> None:
    with pytest.raises(DeviceError, match="more than this machine has"):
        Engine.load(plain, kv_memory="900TB")


def test_memory_that_mlx_does_not_find_is_told_from_other_failures() -> None:
    """The error is recognized by its message: on a CPU, MLX does not raise an error where memory lacks, but
    ends the process.
    """
    for lacking in (
        RuntimeError("[malloc] Unable to allocate 4096 bytes."),
        RuntimeError(
            "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommand…)"
        ),
        MemoryError(),
    ):
        with pytest.raises(OutOfMemory, match="MLX failed"), guard("a test", lambda: 0):
            raise lacking
    with pytest.raises(DeviceError) as other, guard("a test", lambda: 0):
        raise RuntimeError("[matmul] Last dimension of first input")
    assert not isinstance(other.value, OutOfMemory)
