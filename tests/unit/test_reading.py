"""Unread settings of a config.json are rejected by name; text models are found within larger ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.synth import SHAPES
from nearfar.build.unread import check_unread
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
from nearfar.step.models import architecture
from nearfar.step.ops import Norm
from nearfar.step.reading import FLAT, read_model
from tests.support.architectures import CASES, checkpoint, prompt, reference
from tests.support.cases import Case
from tests.support.step_reference import StepReference, load_tensors

NESTED = [case for case in CASES if "text_config" in case.config]


def named(model_type: str) -> Case:
    """The first case of an architecture."""
    return next(case for case in CASES if case.model_type == model_type)


def changed(root: Path, case: Case, **changes: Any) -> BuildOptions:
    """The options for a case's checkpoint with a changed config.json; a key with a dot belongs to a
    section.
    """
    shutil.copytree(checkpoint(case), root)
    config = json.loads((root / "config.json").read_text())
    for key, value in changes.items():
        *sections, last = key.split("__")
        section = config
        for name in sections:
            section = section[name]
        section[last] = value
    (root / "config.json").write_text(json.dumps(config))
    return BuildOptions(str(root), root / "out")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_config_as_transformers_writes_it_is_taken_whole(case: Case, tmp_path: Path) -> None:
    source = open_source(BuildOptions(str(checkpoint(case)), tmp_path, context=case.context))
    assert source.model.vocab_size == 261


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("llama", {"rope_parameters": {"rope_type": "wobbly"}}, r"rope_parameters\.rope_type is \"wobbly\""),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 50.0}},
            r"rope_parameters\.alpha is 50\.0",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "type": "mrope", "factor": 2.0}},
            r"type is \"mrope\"; expected linear",
        ),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "rwkv"]}, "layer_types is"),
        ("granitemoehybrid", {"layer_types": None, "mamba_n_heads": 5}, "mamba_n_heads is 5, and does not"),
        ("granitemoehybrid", {"layer_types": None, "mamba_d_head": 8}, r"4 heads of 8 \(mamba_d_head\)"),
        ("granitemoehybrid", {"layer_types": None, "mamba_n_groups": 3}, "cannot share 3 groups evenly"),
        (
            "granitemoehybrid",
            {"layer_types": None, "time_step_limit": [1, 0]},
            r"time_step_limit is \[1, 0\]",
        ),
        (
            "nemotron_h",
            {"layers_block_type": ["moe"], "n_group": 4},
            "topk_group is 1; expected 4, as n_group",
        ),
        ("nemotron_h", {"layers_block_type": ["mlp", "gru"]}, "not gru"),
        ("nemotron_h", {"layers_block_type": None}, "neither layers_block_type nor hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "a word of M, -"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window is 8"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\]; expected 2 numbers"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_experts_per_tok is 0; expected an integer"),
        ("gemma4_text", {"enable_moe_block": True}, "moe_intermediate_size is null"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type is \"yarn\""),
        ("llama", {"hidden_act": "quick_gelu"}, r"hidden_act is \"quick_gelu\""),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            "layer_types is",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types is",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is"),
        (
            "mistral",
            {"attention_bias": True},
            "attention_bias is true, which nearfar's mistral does not compute",
        ),
        ("qwen2", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm is true"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm is false"),
        ("ministral3", {"rope_parameters": None}, "rope_parameters is null"),
        ("qwen2", {"is_causal": False}, "is_causal is false"),
        ("mistral3", {"text_config__is_causal": False}, r"text_config\.is_causal is false"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; expected 1"),
        ("qwen3", {"rope_parameters__partial_rotary_factor": 0.25}, r"partial_rotary_factor is 0\.25"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ("mistral3", {"text_config__attention_bias": True}, r"text_config\.attention_bias is true"),
        ("mistral3", {"text_config__hidden_act": "relu"}, r"text_config\.hidden_act is \"relu\""),
        ("mistral3", {"text_config__model_type": "gpt2"}, r"text_config\.model_type is 'gpt2'"),
        ("mistral3", {"text_config": 7}, "text_config is int; expected an object"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_source(changed(tmp_path / "changed", named(model_type), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "attention_dropout": 0.1,
            "initializer_range": 0.5,
            "use_cache": False,
            "pretraining_tp": 2,
            "dtype": "float16",
        },
        {"attention_bias": False, "clip_qkv": None, "use_qk_norm": False},
        {"is_causal": True, "partial_rotary_factor": 1.0},
        {"max_window_layers": 21, "a_fork_wrote_this": {"x": 1}, "rope_interleaved": False},
    ],
)
def test_what_changes_nothing_may_stand_there(tmp_path: Path, changes: dict[str, Any]) -> None:
    case = named("mistral")
    plain = open_source(BuildOptions(str(checkpoint(case)), tmp_path)).model
    assert open_source(changed(tmp_path / "changed", case, **changes)).model == plain


def test_windows_mean_nothing_where_no_layer_has_one() -> None:
    config = named("gemma4_text").config
    layers = ["full_attention"] * 4
    every = {**config, "model_type": "gemma4_text", "num_hidden_layers": 4, "layer_types": layers}
    reading = read_model(every)
    check_unread(reading.config, reading.model_type)
    assert {cache.window for cache in reading.model.step.caches} == {None}
    assert list(reading.model.step.ropes) == ["global"], "a table that no layer uses is not in the step"


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    case = named("nemotron_h")
    plain = open_source(BuildOptions(str(checkpoint(case)), tmp_path)).model
    options = changed(
        tmp_path / "changed", case, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-"
    )
    file = tmp_path / "changed" / "model.safetensors"
    save_file({**load_file(file), "mtp.layers.0.enorm.weight": np.ones(48, np.float32)}, file)
    source = open_source(options)
    assert source.model == plain
    assert source.report.skipped == {"mtp": 1}


@pytest.mark.parametrize("shape", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_published_configs_are_read_whole(shape: Path) -> None:
    config = json.loads(shape.read_text())["config"]
    reading = read_model(config)
    check_unread(reading.config, reading.model_type)
    assert len(reading.model.step.ops) > len(reading.model.step.caches) > 0


OTHER_SPELLINGS = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}
"""Prefixes of tensors in published files, and in the classes that read and write them."""
AS_PUBLISHED = {"model.layers.": "model.language_model.layers.", "model.embed": "model.language_model.embed",
                "model.norm": "model.language_model.norm", "visual.": "model.visual."}  # fmt: skip
"""Both prefixes, for models whose published files have the text model's tensors under another prefix."""


@pytest.mark.parametrize("case", NESTED, ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_text_model_is_found_under_both_names(case: Case, swapped: bool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(case), root)
    if swapped:
        tensors = load_file(root / "model.safetensors")
        save_file(
            {_in_the_other_way(case, name): value for name, value in tensors.items()},
            root / "model.safetensors",
        )
    tokens = prompt(case, 20)
    expected, found = reference(case)(tokens), StepReference.of(root).logits(tokens)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    skipped = open_source(BuildOptions(str(root), tmp_path / "out")).report.skipped
    assert {"vision_tower", "visual", "vision_model"} & skipped.keys()
    assert not {"language_model", "text_model", "layers"} & skipped.keys()


def _in_the_other_way(case: Case, name: str) -> str:
    """A tensor's published name from its name in the class, or the other way around."""
    if case.model_type in ("smolvlm", "idefics3"):  # there is one way
        return name
    table = AS_PUBLISHED if case.model_type in FLAT else OTHER_SPELLINGS
    for published, inner in table.items():
        for one, other in ((published, inner), (inner, published)):
            if name.startswith(one):
                return other + name.removeprefix(one)
    return name


@pytest.mark.parametrize("case", [case for case in NESTED if case.model_type in FLAT], ids=str)
def test_the_keys_of_a_text_model_may_stand_beside_those_of_the_whole(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(case), root)
    config = json.loads((root / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "rope_theta": 1e4}
    (root / "config.json").write_text(json.dumps({**text, **config, **flat}))
    tokens = prompt(case, 20)
    expected = reference(case)(tokens)
    assert np.abs(StepReference.of(root).logits(tokens) - expected).max() < 1e-4 * np.abs(expected).max()
    assert open_source(BuildOptions(str(root), tmp_path / "out")).report.skipped.keys() == {"visual"}


def test_what_a_published_text_config_leaves_out_is_what_its_class_has() -> None:
    """Files of older versions of transformers hold only the differences from the class, as LLaVA 1.5's do."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    tensors = ["language_model.model.layers.0.x", "language_model.lm_head.weight"]
    reading = read_model({"model_type": "llava", "text_config": text, "vision_config": {}}, tensors)
    shapes = {name: shape for p in reading.model.step.params for name, shape in p.expected().items()}
    assert shapes["language_model.model.layers.31.mlp.down_proj.weight"] == (4096, 11008)
    assert shapes["language_model.lm_head.weight"] == (32064, 4096)
    assert reading.model.eos_token_ids == (2,)


def test_an_alias_has_the_defaults_of_its_own_class() -> None:
    case = named("iquestcoder")
    step = read_model({"model_type": "iquestcoder", **case.config}).model.step
    assert {op.eps for op in step.ops if isinstance(op, Norm)} == {1e-5}


@pytest.mark.parametrize("head", [True, False])
def test_a_text_model_that_says_it_is_tied_is_so_if_there_is_no_head(head: bool) -> None:
    config = {**named("qwen3_vl").config, "model_type": "qwen3_vl", "tie_word_embeddings": False}
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": True}
    tensors = ["model.language_model.layers.0.x", *(["lm_head.weight"] if head else [])]
    params = [param.name for param in read_model(config, tensors).model.step.params]
    assert ("lm_head" in params) is head


@pytest.mark.parametrize("name", ["audio.weight", "language_model.model.layers.0.mlp.extra.weight"])
def test_a_tensor_of_no_known_part_is_refused(name: str, tmp_path: Path) -> None:
    options = changed(tmp_path / "changed", NESTED[0])
    file = Path(options.checkpoint) / "model.safetensors"
    save_file({**load_file(file), name: np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match=name):
        open_source(options)


def test_without_a_text_model_the_checkpoint_is_refused(tmp_path: Path) -> None:
    options = changed(tmp_path / "changed", NESTED[0])
    file = Path(options.checkpoint) / "model.safetensors"
    save_file({"vision_tower.x.weight": np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match="no tensors language_model"):
        open_source(options)


def test_code_that_a_config_names_is_told_not_to_run(tmp_path: Path) -> None:
    told = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    case = named("qwen2")
    assert open_source(BuildOptions(str(checkpoint(case)), tmp_path)).notes == ()
    (note,) = open_source(changed(tmp_path / "changed", case, auto_map=told)).notes
    assert 'code of its own ("modeling_x.XForCausalLM"), which is not run' in note
    note = open_source(changed(tmp_path / "config", case, auto_map={"AutoConfig": "configuration_x.XConfig"}))
    assert note.notes == ()


def test_a_model_beside_an_adapter_is_refused(tmp_path: Path) -> None:
    options = changed(tmp_path / "changed", named("llama"))
    (Path(options.checkpoint) / "adapter_config.json").write_text('{"base_model_name_or_path": "meta/base"}')
    with pytest.raises(
        CheckpointError, match=r"holds a model and a LoRA adapter of meta/base: nearfar build MODEL"
    ):
        open_source(options)


SPARSE = ("qwen3_moe", "granitemoe", "gpt_oss", "lfm2_moe", "qwen3_5_moe_text")


@pytest.mark.parametrize("model_type", SPARSE)
def test_experts_are_read_from_one_tensor_and_from_one_for_each(model_type: str) -> None:
    """Published files store the experts of a layer in one tensor or separately; the installed transformers
    may write the type either way.
    """
    case = named(model_type)
    config, tensors = load_tensors(checkpoint(case))
    ours = StepReference.of(checkpoint(case))
    step = architecture(config).model(ConfigReader(config)).step
    assert step.spellings
    for param in step.params:
        both = [param.pieces, step.spellings.get(param.name, ())]
        here, there = sorted(both, key=lambda pieces: not pieces or pieces[0].tensor not in tensors)
        rows = ours.weights[param.name]
        for piece in there:
            tensors[piece.tensor] = rows[: piece.rows].reshape(piece.shape(piece.rows, param.k))
            rows = rows[piece.rows :]
        for piece in here if there else ():
            tensors.pop(piece.tensor, None)
    assert set(tensors).isdisjoint(
        {p.tensor for param in ours.step.params for p in param.pieces if param.name in step.spellings}
    )
    respelled = StepReference(read_model(config, tensors).model, tensors)
    tokens = prompt(case, 9)
    np.testing.assert_array_equal(respelled.logits(tokens), ours.logits(tokens))


def test_experts_in_one_tensor_are_read_in_both_layouts() -> None:
    """Published files of Qwen3-VL with experts store them input by input; transformers writes rows."""
    case = named("qwen3_vl_moe")
    config, tensors = load_tensors(checkpoint(case))
    published = {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if ".experts." in name else array
        for name, array in tensors.items()
    }
    tokens = prompt(case, 9)
    ours = StepReference(read_model(config, tensors).model, tensors)
    respelled = StepReference(read_model(config, published).model, published)
    assert respelled.step.params != ours.step.params
    np.testing.assert_array_equal(respelled.logits(tokens), ours.logits(tokens))


LONGROPE = [case for case in CASES if "longrope" in str(case.config)]


@pytest.mark.parametrize("case", LONGROPE, ids=str)
def test_the_long_factors_of_longrope_are_told(case: Case, tmp_path: Path) -> None:
    path = str(checkpoint(case))
    (note,) = open_source(BuildOptions(path, tmp_path)).notes
    assert "build with --context 40" in note
    assert open_source(BuildOptions(path, tmp_path, context=40)).notes == ()


def test_infinity_is_no_limit(tmp_path: Path) -> None:
    """Published files of Nemotron-H contain Infinity, which JSON does not have; transformers writes an
    object.
    """
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(named("nemotron_h")), folder)
    config = json.loads((folder / "config.json").read_text())
    written = json.dumps({**config, "time_step_limit": [0.0, float("inf")]})
    assert "Infinity]" in written
    (folder / "config.json").write_text(written)
    opened = open_source(BuildOptions(str(folder), tmp_path / "out", quant="none"))
    assert opened.model == open_source(BuildOptions(str(checkpoint(named("nemotron_h"))), tmp_path)).model
    (folder / "config.json").write_text(written.replace("Infinity", "-Infinity"))
    with pytest.raises(CheckpointError, match="-Infinity is not a JSON number"):
        open_source(BuildOptions(str(folder), tmp_path / "out"))
