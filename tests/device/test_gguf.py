"""GGUF files, built and run: the answers equal those of the weights that the files represent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.source import open_source
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS
from nearfar.edge_runtime import Engine
from nearfar.errors import CheckpointError
from nearfar.format.manifest import OLDEST, SCALED, VERSION
from nearfar.format.scales import IQ4, OF_GGUF, PAIRS, Scales
from nearfar.step import ops
from tests.support import gguf_files, tiny
from tests.support.architectures import CASES, checkpoint, prompt, reference
from tests.support.backends import greedy as tokens_of
from tests.support.backends import require
from tests.support.cases import Case
from tests.support.gguf_files import WIDE
from tests.support.parity import SMALL, check_answers, last
from tests.support.quantized import ANSWER, CONFIG, PROMPT, answer, greedy, weights, write
from tests.support.step_reference import StepReference
from tests.support.turns import in_turns, share
from tests.support.wasm_executor import open_wasm, require_node

ARCHITECTURES = {
    "llama-plain", "llama-tied", "llama-biased", "llama-linear", "llama-yarn", "mistral-window",
    "qwen2-plain", "qwen3-plain", "smollm3-plain", "phi3-plain", "phi3-partial", "granite-plain",
    "gemma2-plain", "gemma3_text-plain", "olmo2-grouped", "ernie4_5-plain",
}  # fmt: skip
READ = (
    "olmo3-yarn", "exaone4-hybrid", "exaone4-global", "glm-plain", "glm4-unbiased", "hunyuan_v1_dense-alpha",
    "ministral3-growing", "gemma-plain", "gemma4_text-shared", "gemma4_text-own", "gemma4_text-twice",
    "seed_oss-plain", "seed_oss-out-biased", "arcee-plain", "granitemoehybrid-dense",
    "internlm3-plain", "iquestcoder-plain", "granitemoehybrid-mamba", "nemotron_h-plain", "falcon_h1-bare",
    "olmoe-plain", "mixtral-plain", "qwen2_moe-plain",
    "qwen3_moe-plain", "granitemoe-plain", "lfm2-plain", "lfm2_moe-plain", "gpt_oss-plain",
    "qwen3_5_text-plain", "qwen3_5_text-odd", "qwen3_5_moe_text-plain", "qwen3_5_moe_text-odd",
    "granitemoehybrid-experts", "granitemoehybrid-odd", "gemma4_text-experts", "nemotron_h-experts",
    "nemotron_h-latent",
)  # fmt: skip
"""Cases whose files are read and computed in NumPy only: other tests run their lists on devices."""
LIKE_GGUF = {
    "gemma2-plain": {"query_pre_attn_scalar": 24, "attention_bias": False},
    "gemma3_text-plain": {"query_pre_attn_scalar": 24},
    "nemotron_h-plain": {"time_step_min": 1e-9},
    "nemotron_h-experts": {"time_step_min": 1e-9},
    "nemotron_h-latent": {
        "time_step_min": 1e-9,
        "mlp_bias": False,
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
    },
    "qwen3_moe-plain": {"norm_topk_prob": True},
    "gpt_oss-plain": {"swiglu_limit": 7.0},
    "granitemoehybrid-experts": {"hidden_act": "silu"},
    "granitemoehybrid-odd": {"time_step_limit": [0.0, float("inf")]},
}
"""Settings for which GGUF has no keys, with llama.cpp's values."""


def cases() -> list[Case]:
    named = [case for case in CASES if str(case) in ARCHITECTURES]
    assert len(named) == len(ARCHITECTURES)
    return [like_gguf(case) for case in named]


def like_gguf(case: Case) -> Case:
    changes = LIKE_GGUF.get(str(case), {})
    return replace(case, name=f"{case.name}-gguf", config={**case.config, **changes}) if changes else case


@pytest.mark.parametrize("case", share(cases(), 2), ids=str)
def test_floats_answer_as_transformers(case: Case, tmp_path: Path) -> None:
    # the file has no suffix, and its content tells the format
    file = gguf_files.write(checkpoint(case), tmp_path / "a-model")
    options = BuildOptions(
        str(file), tmp_path / "out", ("cpu",), quant="none", cpu_features=("native",), context=case.context,
        buckets=SMALL,
    )  # fmt: skip
    (root,) = build(options)
    with Engine.load(root, kv_memory="4MB") as engine:
        check_answers(case, engine)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("qwen2-plain", "qwen2vl"), ("qwen3-plain", "qwen3vl"), ("qwen3_moe-plain", "qwen3vlmoe")],
)
def test_the_text_model_of_a_file_with_settings_of_images(
    name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = like_gguf(next(case for case in CASES if str(case) == name))
    model = open_source(BuildOptions(str(checkpoint(case)), tmp_path, quant="none")).model
    monkeypatch.setitem(gguf_files.ARCHITECTURES, case.model_type, architecture)

    def seeing(writer: gguf_files.gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_num_deepstack_layers(1)

    file = gguf_files.write(checkpoint(case), tmp_path / "model", change=seeing)
    source = open_source(BuildOptions(str(file), tmp_path / "out", quant="none"))
    assert source.model.step.ops == model.step.ops
    assert source.model.step.ropes == model.step.ropes


@pytest.mark.parametrize("name", READ)
def test_a_file_is_the_checkpoint_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    case = like_gguf(next(case for case in CASES if str(case) == name))
    file = gguf_files.write(checkpoint(case), tmp_path / "a-model")
    source = open_source(BuildOptions(str(file), tmp_path / "out", quant="none", context=case.context))
    held = {tensor: source.checkpoint.read(tensor).astype(np.float32) for tensor in source.checkpoint.entries}
    tokens = prompt(case, max(case.prompts))
    expected = reference(case)(tokens)
    found = StepReference(source.model, held).logits(tokens)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_experts_in_mxfp4_keep_their_codes(tmp_path: Path) -> None:
    """Files of gpt-oss hold the experts of a layer in four-bit floats, and everything else in floats."""
    case = next(case for case in CASES if str(case) == "gpt_oss-plain")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": None}
    case = replace(case, name="mxfp4-gguf", config={**case.config, **sizes, **LIKE_GGUF["gpt_oss-plain"]})
    stands_for: dict[str, np.ndarray[Any, Any]] = {}

    def store(name: str, value: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        if ".experts." not in name or value.ndim < 3:
            return value, "F32"
        rows = gguf_files.random_rows(
            "MXFP4", value.shape[0] * value.shape[1], value.shape[2], len(stands_for)
        )
        at, part, _ = name.rsplit(".", 2)
        floats = gguf_files.floats(rows, "MXFP4").reshape(value.shape)
        stands_for.update({f"{at}.{e}.{part}.weight": each for e, each in enumerate(floats)})
        return rows.reshape(*value.shape[:2], -1), "MXFP4"

    file = gguf_files.write(checkpoint(case), tmp_path / "a-model", store)
    options = BuildOptions(
        str(file), tmp_path / "out", ("cpu",), cpu_features=("native",), buckets=SMALL
    )  # fmt: skip
    source = open_source(options)
    assert source.quantized is not None
    assert set(source.quantized.tensors) == set(stands_for)
    for name, floats in stands_for.items():
        np.testing.assert_array_equal(source.quantized.weights(name, 3, 17), floats[3:17], err_msg=name)
    held = stands_for | {
        name: source.checkpoint.read(name).astype(np.float32)
        for name in source.checkpoint.entries if name not in stands_for
    }  # fmt: skip
    tokens = prompt(case, 30)
    expected = StepReference(source.model, held).logits(tokens)[-1]
    (root,) = build(options)
    with Engine.load(root, kv_memory="4MB") as engine:
        tokens_of(engine, tokens, 1)
        found = last(engine)
    assert np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()
    matrices = json.loads((root / "manifest.json").read_text())["quantization"]["matrices"]
    assert [m["carried"] for m in matrices if ".experts." in m["name"]] == ["exact"] * 4


def test_layers_that_draft_are_left_out_and_told(tmp_path: Path) -> None:
    """Files of Qwen 3.5 may end with layers for speculative decoding, which safetensors files call `mtp.`."""
    case = next(case for case in CASES if str(case) == "qwen3_5_moe_text-odd")

    def change(writer: gguf_files.gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_uint32("qwen35moe.nextn_predict_layers", 1)
        writer.add_array("qwen35moe.attention.recurrent_layers", [True, False, True, False])
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((48, 96), np.float32))
        rows = gguf_files.random_rows("Q8_0", 5 * 17, 64).reshape(5, 17, -1)
        writer.add_tensor("blk.3.ffn_up_exps.weight", rows, raw_dtype=gguf_files.KINDS["Q8_0"])

    file = gguf_files.write(checkpoint(case), tmp_path / "x", change=change)
    source = open_source(BuildOptions(str(file), tmp_path / "out", quant="none"))
    assert source.report.skipped == {"mtp": 2}
    assert sum(isinstance(op, ops.Delta) for op in source.model.step.ops) == 2


BY_LAYER = {
    "glm4-unbiased": "",
    "exaone4-hybrid": "attention.sliding_window_pattern",
    "lfm2-plain": "attention.head_count_kv",
}
"""Cases whose files get layers that draft, with the key that has a value for each layer."""


@pytest.mark.parametrize("name", BY_LAYER)
def test_files_of_any_architecture_may_end_with_layers_that_draft(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if str(case) == name)
    plain = open_source(BuildOptions(str(gguf_files.write(checkpoint(case), tmp_path / "plain")), tmp_path))
    layers = plain.checkpoint.config["num_hidden_layers"]

    def drafting(count: int) -> Path:
        def change(writer: gguf_files.gguf.GGUFWriter) -> None:
            writer.add_block_count(layers + 2)
            writer.add_uint32(f"{writer.arch}.nextn_predict_layers", count)
            if BY_LAYER[name]:
                key = f"{writer.arch}.{BY_LAYER[name]}"
                stored = list(writer.kv_data[0][key].value)
                writer.add_array(key, [*stored, *stored[:2]])
            for layer in (layers, layers + 1):
                writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((48, 96), np.float32))
                writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(48, np.float32))

        return gguf_files.write(checkpoint(case), tmp_path / f"drafting-{count}", change=change)

    source = open_source(BuildOptions(str(drafting(2)), tmp_path))
    assert source.report.skipped == {"mtp": 4}
    assert source.model == plain.model
    assert source.checkpoint.config == plain.checkpoint.config
    with pytest.raises(CheckpointError, match=rf"nextn_predict_layers is {layers + 2}; expected less than"):
        open_source(BuildOptions(str(drafting(layers + 2)), tmp_path))
    with pytest.raises(CheckpointError, match=rf"extra: blk\.{layers}\.nextn"):
        open_source(BuildOptions(str(drafting(0)), tmp_path))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_heads_of_values_stay_where_they_are(kind: str, tmp_path: Path) -> None:
    """The heads of values of a linear attention are in another order than in safetensors files. All codes are
    carried exactly, also in blocks wider than a head.
    """
    case = next(case for case in CASES if str(case) == "qwen3_5_text-plain")
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "linear_value_head_dim": 64,
        "num_hidden_layers": 1,
    }
    case = replace(
        case, name="packed-gguf", config={**case.config, **sizes, "layer_types": ["linear_attention"]}
    )
    stands_for: dict[str, np.ndarray[Any, Any]] = {}

    def store(name: str, value: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
        if value.ndim < 2 or "conv1d" in name:
            return value, "F32"
        rows = gguf_files.random_rows(kind, *value.shape, len(stands_for))
        stands_for[name] = gguf_files.floats(rows, kind)
        return rows, kind

    source = open_source(
        BuildOptions(str(gguf_files.write(checkpoint(case), tmp_path / "x", store)), tmp_path)
    )
    assert source.quantized is not None
    assert source.quantized.tensors.keys() == stands_for.keys()
    for name, floats in stands_for.items():
        np.testing.assert_array_equal(source.quantized.weights(name, 0, 200), floats[:200], err_msg=name)
        scheme = source.quantized.tensors[name]
        assert scheme is not None
        assert source.quantized.carry(name, 0, 200, scheme.scales).change == 0


FEW_BITS = ("TQ1_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
"""Types whose codes only tests/unit/test_gguf.py compares: devices treat them like the other types."""
KINDS = (*(kind for kind in BLOCKS if kind not in FEW_BITS), "Q4_K_M")
ROUNDED = ("IQ3_S",)
STORED = {"Q4_K": (4, 32, OF_GGUF["Q4_K"]), "Q6_K": (6, 16, OF_GGUF["Q6_K"])}


@pytest.mark.parametrize("kind", share(KINDS, 3))
def test_quantized_matrices_keep_their_codes(kind: str, tmp_path: Path) -> None:
    file, floats = gguf_files.mixed(tmp_path, kind)
    floats |= {name: value for name, value in weights(WIDE).items() if value.ndim == 1}
    found, manifest = answer(file, tmp_path / "out")
    assert found == greedy(floats, WIDE)
    matrices = [m for m in manifest["quantization"]["matrices"] if m["name"].startswith("layers.")]
    expected = "codes exact, offsets rounded" if kind in ROUNDED else "exact"
    assert {matrix["carried"] for matrix in matrices} == {expected}
    scales = {Scales(**m.get("scales", {})) for m in matrices} | {PAIRS}
    assert manifest["version"] == (VERSION if kind in IQ4 else SCALED if scales != {PAIRS} else OLDEST)
    if kind in IQ4:
        assert {row[1:] for m in matrices for row in rows_of(m)} == {(4, 32, IQ4[kind])}
        assert sum(shard["bytes"] for shard in manifest["weights"]["shards"]) <= 1.02 * file.stat().st_size
    if kind in gguf_files.MIXED:  # q, k and v are computed together, but stored as the file has them
        stored = {m["name"].removeprefix("layers.0."): rows_of(m) for m in matrices}
        wide, high = STORED["Q4_K"], STORED["Q6_K"]
        assert stored == {"qkv": [(384, *wide), (128, *high)], "o": [(256, *wide)], "gate_up": [(512, *wide)],
                          "down": [(256, *high)]}  # fmt: skip
    if expected == "exact":
        quantized = open_source(BuildOptions(str(file), tmp_path)).quantized
        assert quantized is not None
        for name in quantized.tensors:
            np.testing.assert_array_equal(quantized.weights(name, 5, 77), floats[name][5:77], err_msg=name)


@in_turns("target")
@pytest.mark.parametrize("target", ["vulkan", "webgpu"])
@pytest.mark.parametrize("kind", ["Q4_K_M", *IQ4])
def test_a_gpu_stores_the_bytes_of_the_file(kind: str, target: str, tmp_path: Path) -> None:
    """Types mixed as llama.cpp mixes them, and types with a table: exact, not larger, and the answer is that
    of the weights.
    """
    require(target)
    below = 2500 if kind in IQ4 else 100  # larger weights exceed float16, as the test of trained sizes says
    file, floats = gguf_files.mixed(tmp_path, kind, below)
    floats |= {name: value for name, value in weights(WIDE).items() if value.ndim == 1}
    found, manifest = answer(file, tmp_path / "out", target, device_classes=("software",))
    assert found == greedy(floats, WIDE)
    matrices = manifest["quantization"]["matrices"]
    assert {matrix["carried"] for matrix in matrices} == {"exact"}
    (qkv,) = (rows_of(m) for m in matrices if m["name"] == "layers.0.qkv")
    if kind in IQ4:
        assert {row[1:] for row in qkv} == {(4, 32, IQ4[kind])}
    else:
        assert qkv == [(384, *STORED["Q4_K"]), (128, *STORED["Q6_K"])]
    assert sum(shard["bytes"] for shard in manifest["weights"]["shards"]) <= 1.02 * file.stat().st_size


@in_turns("kind")
@pytest.mark.parametrize("kind", sorted(IQ4))
def test_webassembly_looks_codes_up_in_their_table(kind: str, tmp_path: Path) -> None:
    require_node()
    file, floats = gguf_files.mixed(tmp_path, kind)
    floats |= {name: value for name, value in weights(WIDE).items() if value.ndim == 1}
    (root,) = build(BuildOptions(str(file), tmp_path / "out", ("wasm",), buckets=SMALL))
    with open_wasm(root, 1) as engine:
        assert tokens_of(engine, PROMPT, ANSWER) == greedy(floats, WIDE)
    assert sum(each.stat().st_size for each in (root / "weights").iterdir()) <= 1.02 * file.stat().st_size


def test_float16_programs_hold_the_values_of_weights_of_trained_size(tmp_path: Path) -> None:
    """Between the kernels of a layer, programs in float16 store values up to 65,504; the largest are those of
    the gated units. Weights with a deviation of 0.35, which is ten times that of trained models, stay below a
    hundredth of that. Scales of up to 0.01 times integers of 8 bits times codes of 6 bits give a deviation of
    9: those gated units exceed the range, and saturate (tests/support/gpu_checks.py has that test).
    """
    require("vulkan")
    for below, most, least in ((2500, 655, 0), (100, np.inf, 65504)):
        folder = tmp_path / str(below)
        folder.mkdir()
        file, floats = gguf_files.mixed(folder, "Q6_K_L", below)
        floats |= {name: value for name, value in weights(WIDE).items() if value.ndim == 1}
        reference = StepReference(open_source(BuildOptions(str(file), folder)).model, floats)
        reference.logits(list(PROMPT))
        gated = [value for name, value in reference.values.items() if name.startswith("glu")]
        assert gated
        assert least < max(np.abs(value).max() for value in gated) < most
        if not least:
            classes: dict[str, Any] = {"device_classes": ("integrated",)}
            found, _ = answer(file, folder / "out", "vulkan", "f16", **classes)
            assert found == greedy(floats, WIDE)


def rows_of(matrix: dict[str, Any]) -> list[tuple[int, int, int, Scales]]:
    """For each piece of a matrix: its rows, bits, group size and scales."""
    pieces = matrix.get("pieces", [matrix])
    return [(p["n"], p["bits"], p["group_size"], Scales(**p.get("scales", {}))) for p in pieces]


def test_split_parts_are_one_model(tmp_path: Path) -> None:
    plain = weights()
    directory = write(tmp_path / "plain", CONFIG, plain)
    (tmp_path / "parts").mkdir()
    gguf_files.write(directory, tmp_path / "parts" / "model.gguf", split=5)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) > 2
    (tmp_path / "parts" / "README.md").write_text("# A model")
    for named in (parts[1], tmp_path / "parts"):
        checkpoint = open_source(BuildOptions(str(named), tmp_path)).checkpoint
        assert checkpoint.name == "model"
        for name, value in plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), value, err_msg=name)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=f"parts are missing: {parts[2].name}"):
        open_source(BuildOptions(str(parts[0]), tmp_path))


def test_what_changes_the_computation_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "plain", CONFIG, weights())
    file = gguf_files.write(directory, tmp_path / "x", change=lambda writer: writer.add_expert_count(8))
    with pytest.raises(CheckpointError, match=r"llama\.expert_used_count is null"):
        open_source(BuildOptions(str(file), tmp_path))


def test_frequencies_of_llama_3(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": False}
    directory = write(tmp_path / "plain", config, weights())
    factors = np.linspace(1, 8, 16).astype(np.float32)
    file = gguf_files.write(
        directory, tmp_path / "x", change=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    (rope,) = open_source(BuildOptions(str(file), tmp_path)).model.step.ropes.values()
    expected = 1 / (10000.0 ** (np.arange(0, 32, 2) / 32)) / factors
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=1e-6)
    assert rope.scale == 1


@pytest.mark.parametrize("name", ["phi3-partial-short", "phi3-partial-long"])
def test_frequencies_of_phi_3(name: str, tmp_path: Path) -> None:
    """Factors are tensors; tests which of the two sets is used, and how positions of longer texts
    are scaled.
    """
    (case,) = (case for case in CASES if str(case) == name)
    rope = case.config["rope_parameters"]

    def change(writer: gguf_files.gguf.GGUFWriter) -> None:
        for which in ("short", "long"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    plain = checkpoint(case)
    options = [
        BuildOptions(str(file), tmp_path / "out", context=case.context)
        for file in (plain, gguf_files.write(plain, tmp_path / "x", change=change))
    ]
    expected, found = (open_source(option).model.step.ropes.values() for option in options)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-6)
        assert ours.scale == pytest.approx(theirs.scale)


def test_ends_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    file = gguf_files.write(write(tmp_path / "plain", CONFIG, weights()), tmp_path / "x")
    source = open_source(BuildOptions(str(file), tmp_path))
    assert (source.model.bos_token_id, source.model.eos_token_ids) == (256, (257,))
    assert source.checkpoint.chat_templates.plain == tiny.TEMPLATE
    assert source.checkpoint.license_text == "mit"
