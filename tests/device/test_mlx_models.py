"""Every architecture in the mlx target's form: loaded by mlx-lm, exported as a function, and built again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import BuildError
from tests.support.architectures import ATTENDING, checkpoint, make, prompt, reference
from tests.support.backends import last_logits
from tests.support.cases import Case
from tests.support.late import late
from tests.support.massive import GROWTH, Massive
from tests.support.mlx_artifact import Direct
from tests.support.recurrent_cases import RECURRENT
from tests.support.turns import share

mx = pytest.importorskip("mlx.core", reason="needs MLX (pip install 'nearfar[mlx]')")
mlx_lm = late("mlx_lm", reason="mlx-lm is not installed")

Array = npt.NDArray[Any]

TOLERANCE = 1e-4  # as a share of the largest logit; both sides compute in float32
NARROW = {"gemma3_text": 2e-3, "gemma3": 2e-3, "gemma4_text": 5e-3, "gemma4": 5e-3}
"""Tolerances of model types for which mlx-lm rounds the factor of the embedding to bfloat16, whatever the
model's dtype is.
"""

OTHERWISE = {
    "llama-wide": "hidden_act is always silu",
    "llama-yarn-mscale": "truncate of yarn is left out",
    "llama-longrope-short": "longrope always takes the long factors",
    "mistral-window": "a window in every layer is none",
    "mistral3-with-mistral-window": "a window in every layer is none",
    "qwen2-window": "windows are left out",
    "qwen3-biased": "there are no biases, and hidden_act is always silu",
    "phi3-plain": "windows are left out",
    "phi3-partial-short": "longrope always takes the long factors",
    "phi3-factor": "the factor of longrope is left out",
    "gemma2-plain": "windows are left out",
    "gemma2-uncapped": "there are no biases, and always caps",
    "gemma3_text-listed": "a window is left out at regular intervals, never as listed",
    "olmo3-yarn": "the attention_factor of yarn is left out",
    "glm4-unbiased": "the head is never the embedding",
    "glm-plain": "all of each head rotates",
    "glm-unbiased": "all of each head rotates",
    "gemma-biased": "there are no biases, and the head is always the embedding",
    "granitemoehybrid-experts": "hidden_act is always silu",
    "qwen2_moe-mixed": "every layer has experts, windows are left out, and hidden_act is always silu",
    "granitemoehybrid-still": "the MLP has the size of intermediate_size",
    "qwen2_5_vl-with-qwen2_5_vl_text-text": "windows are left out",
    "mixtral-window": "windows are left out, hidden_act is always silu, and head_dim is hidden_size / heads",
    "qwen3_moe-mixed": "windows and biases are left out",
}
"""Differences between mlx-lm's class of a case and transformers."""


CLASSLESS = (
    "arcee", "cwm", "exaone4_5", "granitemoeshared", "hyperclovax", "hyperclovax_vision_v2", "idefics3",
    "internvl", "llava_next", "llava_next_video", "llava_onevision", "smolvlm", "vipllava",
)  # fmt: skip
"""Model types without a class in mlx-lm: only nearfar's own runtime runs their artifacts."""
WHOLE = ("granitemoehybrid-dense",)
"""Cases whose joined matrices mlx-lm splits only if they are not quantized."""
OURS = ("gpt_oss", "qwen3_vl_moe")
"""Model types that only nearfar's runtime reads: mlx-lm keeps gate and up of all experts in
separate tensors.
"""
FLOATS = ("qwen3_moe", "granitemoe", *OURS)
"""Model types whose experts' matrices mlx-lm joins only if they are floats."""


@pytest.fixture(scope="module", params=share(ATTENDING, 2, lambda case: case.model_type), ids=str)
def made(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def root(made: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlx")
    options = BuildOptions(
        str(checkpoint(made)), out, ("mlx",), "none", context=made.context, export_function=not made.experts
    )
    (path,) = build(options)
    return path


def away(found: Array, expected: Array) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_mlx_lm_computes_the_same(made: Case, root: Path, request: pytest.FixtureRequest) -> None:
    if made.model_type in CLASSLESS:
        with pytest.raises(ValueError, match="not supported"):
            mlx_lm.utils.load_model(root)
        return
    if made.model_type in OURS:
        pytest.skip("nearfar's runtime alone reads it")
    if str(made) in OTHERWISE:
        request.applymarker(pytest.mark.xfail(strict=True, reason=f"mlx-lm: {OTHERWISE[str(made)]}"))
    model, _ = mlx_lm.utils.load_model(root)
    for count in made.prompts:
        tokens = prompt(made, count)
        found = np.array(model(mx.array([tokens])).astype(mx.float32))[0]
        assert away(found, reference(made)(tokens)) < NARROW.get(made.model_type, TOLERANCE), count


def test_the_exported_function_computes_the_same(made: Case, root: Path) -> None:
    """A prompt is computed in parts, each with padding on both sides."""
    if made.experts:
        pytest.skip("a function has no experts")
    step, about = mx.import_function(str(root / "step.mlxfn"), return_metadata=True)
    about, weights = json.loads(about), mx.load(str(root / "model.safetensors"))
    tokens = prompt(made, max(made.prompts))
    expected = reference(made)(tokens)
    cached = mx.zeros((1, 0), mx.int32)
    cache = [mx.zeros((1, c["kv_heads"], 0, c["head_dim"])) for c in about["caches"] for _ in "kv"]
    for start in range(0, len(tokens), 7):
        part = tokens[start : start + 7]
        positions = [-1, *range(start, start + len(part)), -1]
        rows = [[1 + row for row in range(len(part))]]
        ints = [mx.array(values, mx.int32) for values in ([[0, *part, 0]], [positions], rows)]
        logits, cached, *cache = step((*ints, cached, *cache), weights)
        assert away(np.array(logits[0]), expected[start : start + len(part)]) < TOLERANCE


def test_the_files_are_a_checkpoint_again(made: Case, root: Path, tmp_path: Path) -> None:
    if made.model_type in OURS:
        pytest.skip("its matrices are stored output by output")
    (again,) = build(BuildOptions(str(root), tmp_path, ("mlx",), "none", context=made.context))
    assert (again / "config.json").read_bytes() == (root / "config.json").read_bytes()
    before, after = (load_file(path / "model.safetensors") for path in (root, again))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    first, second = (Artifact.open(path).manifest for path in (root, again))
    assert (first.step, first.ropes, first.caches) == (second.step, second.ropes, second.caches)


def test_quantized_weights_are_those_of_mlx_lm(made: Case, tmp_path: Path) -> None:
    """Some matrices are quantized and some are not, as their widths allow; our writer applies orders of rows
    and pieces.
    """
    options = BuildOptions(str(checkpoint(made)), tmp_path, ("mlx",), "q8", 32, context=made.context)
    (path,) = build(options)
    tokens = prompt(made, min(made.prompts))
    with Engine.load(path, kv_memory="16MB", precision="f32") as engine:
        found = last_logits(engine, tokens)
    assert away(found, reference(made)(tokens)[-1]) < 0.1
    widths = {matrix.k for matrix in Artifact.open(path).manifest.quantization.matrices}
    if str(made) not in (*OTHERWISE, *WHOLE) and made.model_type not in (*FLOATS, *CLASSLESS):
        model, config = mlx_lm.utils.load_model(path)
        assert ("quantization" in config) == any(width % 32 == 0 for width in widths)
        model.set_dtype(mx.float32)
        theirs = np.array(model(mx.array([tokens])).astype(mx.float32))[0, -1]
        assert away(found, theirs) < NARROW.get(made.model_type, TOLERANCE)


@pytest.mark.parametrize("where", GROWTH)
def test_massive_activations_stay_finite_in_float16(where: str, tmp_path: Path) -> None:
    model = Massive(tmp_path / "checkpoint", where)
    (path,) = build(BuildOptions(str(model.path), tmp_path / "out", ("mlx",), "none"))
    direct = Direct(path, precision="f16")
    direct.pages(list(range(4)))
    found = direct.prefill(model.tokens)
    assert np.isfinite(found).all()
    # where gates saturate, answers differ from those of float32, but are still finite answers
    if where == "residual":
        assert away(found, model.logits()) < 0.03


@pytest.mark.parametrize("name", ["lfm2-plain", "qwen3_5_text-plain", "granitemoehybrid-mamba"])
def test_states_are_float32_in_a_float16_program(name: str, tmp_path: Path) -> None:
    given = next(each for each in RECURRENT if str(each) == name)
    (path,) = build(BuildOptions(str(checkpoint(given)), tmp_path, ("mlx",), "none"))
    direct, tokens = Direct(path, precision="f16"), prompt(given, 45)
    direct.pages(list(range(4)))
    assert away(direct.prefill(tokens), reference(given)(tokens)[-1]) < 0.02
    kept = direct.device.read_pages(direct.groups[-1], [0])
    kinds = {cache: array.dtype for cache, array in kept.items() if cache[-1] in "xs"}
    assert kinds
    assert set(kinds.values()) == {np.dtype("float32")}


def test_caches_of_different_sizes_are_quantized_each(tmp_path: Path) -> None:
    """Gemma 4 with heads of 32 and 64 values: each cache has groups of a fitting size."""
    given = next(each for each in ATTENDING if str(each) == "gemma4_text-shared")
    wide = {"head_dim": 32, "global_head_dim": 64}
    source = make(replace(given, config={**given.config, **wide}), tmp_path / "checkpoint")
    (path,) = build(BuildOptions(str(source), tmp_path / "out", ("mlx",), "none"))
    tokens = prompt(given, 45)
    exact = Direct(path)
    exact.pages(list(range(4)))
    expected = exact.prefill(tokens)
    quantized = Direct(path, kv_bits=8)
    quantized.pages(list(range(4)))
    content = [quantized.device.read_pages(group, [0]) for group in quantized.groups]
    codes = {array.shape[-1] for part in content for name, array in part.items() if name.endswith("codes")}
    assert codes == {8, 16}, "in words of four codes"
    assert 0 < away(quantized.prefill(tokens), expected) < 0.05


def test_a_window_bounds_what_is_read(made: Case, root: Path) -> None:
    """Values before every window may be overwritten, so pages there can be freed."""
    if made.window is None or max(made.prompts) < made.window + 32:
        pytest.skip("no window, or no prompt that is much longer")
    manifest = Artifact.open(root).manifest
    tokens = prompt(made, max(made.prompts))
    direct = Direct(root)
    direct.pages(list(range(8)))
    direct.prefill(tokens[:-1])
    expected = direct.step(tokens[-1:], len(tokens) - 1)
    free = (len(tokens) - made.window) // manifest.cache.page_size
    for group, record in enumerate(manifest.groups):
        if record.window is not None:
            direct.spoil(group, list(range(free)))
    np.testing.assert_array_equal(direct.step(tokens[-1:], len(tokens) - 1), expected)


@pytest.mark.parametrize(("given", "said"), [
    (next(each for each in ATTENDING if each.experts), "experts"), (RECURRENT[0], "a short convolution"),
], ids=str)  # fmt: skip
def test_experts_and_states_are_not_exported(given: Case, said: str, tmp_path: Path) -> None:
    options = BuildOptions(str(checkpoint(given)), tmp_path, ("mlx",), "none", export_function=True)
    with pytest.raises(BuildError, match=f"--export-function is not for models with {said}"):
        build(options)
