"""Reading config.json: shapes, rope frequencies as transformers computes them, rejected settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nearfar.build.unread import check_unread
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
from nearfar.step.model import Model
from nearfar.step.ops import Attend
from nearfar.step.reading import read_model
from nearfar.step.rope import Rotation, read_rope
from tests.support.late import late

transformers, rope_utils = late("transformers"), late("transformers.modeling_rope_utils")

BASE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 1024}


def model(**changes: Any) -> Model:
    """The model of BASE with changes."""
    return read_model({**BASE, **changes}).model


def rotation(head_dim: int, context: int = 4096, **changes: Any) -> Rotation:
    """The table of BASE with changes."""
    return read_rope(ConfigReader({**BASE, **changes}), head_dim, context, parts=True)


def shapes(made: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors from which the weights are made."""
    return {name: shape for param in made.step.params for name, shape in param.expected().items()}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        {**YARN, "attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False},
        {**YARN, "factor": 1.0},
        {**LONG, "factor": 4.0},
        LONG,
        {**LONG, "attention_factor": 1.2},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize(("head_dim", "part"), [(32, 1.0), (80, 1.0), (128, 0.75), (64, 0.5)])
@pytest.mark.parametrize("context", [1024, 4096])
def test_rope_frequencies_equal_those_of_transformers(
    scaling: dict, head_dim: int, part: float, context: int
) -> None:
    turning = int(head_dim * part) // 2
    rope = {**scaling, "rope_theta": 500000.0, "partial_rotary_factor": part}
    if scaling["rope_type"] == "longrope":
        rope |= {
            "short_factor": [1.0 + 0.01 * i for i in range(turning)],
            "long_factor": [3.0 + i for i in range(turning)],
        }
    theirs = transformers.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "model_type"}, head_dim=head_dim, rope_parameters=dict(rope)
    )
    expected, scale = rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu", seq_len=context)
    ours = rotation(head_dim, context, rope_parameters=rope)
    assert ours.rotary == 2 * turning
    np.testing.assert_allclose(ours.rope.inv_freq[:turning], expected.numpy(), rtol=2e-6)
    assert ours.rope.inv_freq[turning:] == (0.0,) * (head_dim // 2 - turning), (
        "what does not turn has frequency 0"
    )
    assert ours.rope.scale == pytest.approx(scale)


def test_unscaled_rope_is_that_of_transformers() -> None:
    theirs = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, rope_theta=1e6)
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs).inv_freq
    np.testing.assert_allclose(rotation(64, rope_theta=1e6).rope.inv_freq, expected.numpy(), rtol=2e-6)


def test_old_spelling_of_rope_scaling() -> None:
    old = rotation(64, rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    assert old == rotation(64, rope_parameters={"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0})
    assert old != rotation(64, rope_theta=1e6)


def test_head_dim_need_not_divide_the_hidden_size() -> None:
    made = model(head_dim=80)
    assert made.step.params[2].n == (4 + 2 * 2) * 80
    assert shapes(made)["model.layers.0.self_attn.o_proj.weight"] == (128, 320)


def test_biases_and_head_follow_the_config() -> None:
    plain = {param.name for param in model(tie_word_embeddings=True).step.params}
    assert "lm_head" not in plain
    assert not any(name.endswith(".bias") for name in plain)
    full = {param.name for param in model(attention_bias=True, mlp_bias=True).step.params}
    assert full - plain == {"lm_head"} | {
        f"layers.{i}.{part}.bias" for i in range(2) for part in ("qkv", "o", "gate_up", "down")
    }


def windows(model_type: str, **changes: Any) -> list[int | None]:
    """The window of each layer's attention, which must equal that of its cache."""
    step = model(model_type=model_type, **changes).step
    found = [op.window for op in step.ops if isinstance(op, Attend)]
    assert found == [cache.window for cache in step.caches]
    return found


def test_windows_apply_where_the_config_says() -> None:
    assert windows("mistral", sliding_window=64) == [64, 64]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("mistral") == [4096, 4096], "as transformers has it where nothing is said"
    mixed = ["full_attention", "sliding_attention"]
    assert windows("mistral", sliding_window=64, layer_types=mixed) == [None, 64]
    assert windows("llama", sliding_window=64) == [None, None]
    for model_type in ("qwen2", "qwen3"):
        on = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
        assert windows(model_type, **on) == [None, 64]
        assert windows(model_type, **{**on, "use_sliding_window": False}) == [None, None]
        assert windows(model_type, **{**on, "max_window_layers": 2}) == [None, None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "ntk"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
    ],
)
def test_unsupported_values_are_named(change: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model(**change)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *[
            ({"rope_theta": value}, "rope_theta is")
            for value in (0, -1, float("nan"), 1e-300, True, "1e4", 10**400)
        ],
        *[
            ({"rope_parameters": {"rope_theta": value}}, "rope_parameters.rope_theta")
            for value in (0, True, [1])
        ],
        *[
            ({"rope_scaling": {**LINEAR, "factor": value}}, "rope_scaling.factor is")
            for value in (0, True, float("inf"), "2")
        ],
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is null; expected a number"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor is 4.0; expected more than low_freq_factor",
        ),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": "8k"}},
            'original_max_position_embeddings is "8k"',
        ),
        ({"rope_scaling": {**LINEAR, "mscale": 0.7}}, r"rope_scaling.mscale is 0.7; expected nothing"),
        ({"rope_scaling": {**LINEAR, "type": "llama3"}}, "rope_scaling.type is"),
        (
            {"rope_scaling": LINEAR, "rope_parameters": LLAMA3},
            "rope_parameters and rope_scaling say different things",
        ),
        ({"rope_scaling": [2.0]}, "rope_scaling is .*; expected an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling.rope_type is"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1; expected 1: transformers turns"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "rope_parameters.partial_rotary_factor is 1.5"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "factor": 2.0,
                }
            },
            "rope_scaling.short_factor is .*; expected 16 numbers",
        ),
        ({"rope_traditional": True}, "rope_traditional is true"),
        *[
            ({"rms_norm_eps": value}, "rms_norm_eps is")
            for value in (True, 10**400, 1e-300, 0, "1e-5", [1e-5])
        ],
        *[({"tie_word_embeddings": value}, "tie_word_embeddings is") for value in ("false", 0, 1, [])],
        ({"attention_bias": "no"}, "attention_bias is"),
        *[
            ({key: value}, f"{key} is")
            for key in ("eos_token_id", "bos_token_id")
            for value in (-1, [1, -1], 1.7, True, 512, "2", {}, [[1]])
        ],
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; expected an integer from 1 to 4,096",
        ),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000; expected"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": 128.0}, "hidden_size is 128.0"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": 7}, "layer_types is 7"),
        (
            {"model_type": "mistral", "sliding_window": 64, "layer_types": [["x"], "full_attention"]},
            "layer_types is",
        ),
        ({"model_type": "qwen3", "use_sliding_window": "no", "sliding_window": 64}, "use_sliding_window is"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": "1",
            },
            "max_window_layers",
        ),
        ({"model_type": "qwen3", "head_dim": 0}, "head_dim is 0"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(change: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model(**change)


def test_a_part_of_a_head_is_even() -> None:
    with pytest.raises(CheckpointError, match="expected a part of head_dim 32 that is even, not 3"):
        rotation(32, partial_rotary_factor=0.1)


def test_a_value_that_is_long_is_cut_short() -> None:
    with pytest.raises(CheckpointError) as caught:
        model(eos_token_id=["x" * 100_000])
    assert len(str(caught.value)) < 300


def test_null_is_absent_and_both_spellings_may_agree() -> None:
    scaling = {**LINEAR, "rope_theta": 5e5, "mscale": None}
    twice = model(rope_theta=None, rope_scaling=scaling, rope_parameters=scaling, eos_token_id=None)
    assert twice == model(rope_theta=5e5, rope_scaling=LINEAR)
    assert twice.eos_token_ids == ()


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip
LLAMA32 = {
    **SMOLLM2, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_scaling": {**LLAMA3,
    "original_max_position_embeddings": 8192}, "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    **SMOLLM2, "model_type": "qwen3", "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_size": 1024, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_theta": 1000000, "sliding_window": None,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL = {
    **SMOLLM2, "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize(
    "config", [SMOLLM2, LLAMA32, QWEN3, MISTRAL], ids=["smollm2", "llama32", "qwen3", "mistral"]
)
def test_configs_of_the_hub_are_taken(config: dict) -> None:
    reading = read_model(config)
    check_unread(reading.config, reading.model_type)
    assert len(reading.model.step.caches) == config["num_hidden_layers"]
    # transformers 5 writes the same config in another form.
    ours = transformers.AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
    )
    again = read_model(ours.to_dict())
    check_unread(again.config, again.model_type)
    assert again.model == reading.model
