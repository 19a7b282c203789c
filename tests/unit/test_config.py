"""Reading config.json: shapes, rope frequencies as transformers computes them, refusals."""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nearfar.errors import CheckpointError
from nearfar.step.models import architecture, llama

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


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rope_frequencies_equal_those_of_transformers(scaling: dict, head_dim: int) -> None:
    rope = {**scaling, "rope_theta": 500000.0}
    config = llama.parse({**BASE, "head_dim": head_dim, "rope_parameters": rope})
    theirs = transformers.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "model_type"}, head_dim=head_dim, rope_parameters=rope
    )
    if scaling["rope_type"] == "default":
        expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs).inv_freq
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")
    np.testing.assert_allclose(config.rope.inv_freq(head_dim), expected.numpy(), rtol=2e-6)


def test_old_spelling_of_rope_scaling() -> None:
    config = llama.parse({**BASE, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 2.0, 1e6)


def test_head_dim_need_not_divide_the_hidden_size() -> None:
    config = llama.parse({**BASE, "head_dim": 80})
    assert config.qkv_size == (4 + 2 * 2) * 80
    shapes = {name: shape for param in llama.params(config) for name, shape in param.expected().items()}
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (128, 320)


def test_biases_and_head_follow_the_config() -> None:
    plain = {param.name for param in llama.params(llama.parse({**BASE, "tie_word_embeddings": True}))}
    assert "lm_head" not in plain
    assert not any(name.endswith(".bias") for name in plain)
    full = {param.name for param in llama.params(llama.parse({**BASE, "attention_bias": True, "mlp_bias": True}))}
    assert full - plain == {"lm_head"} | {
        f"layers.{i}.{part}.bias" for i in range(2) for part in ("qkv", "o", "gate_up", "down")
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
    ],
)
def test_unsupported_values_are_named(change: dict, said: str) -> None:
    config = {**BASE, **change}
    with pytest.raises(CheckpointError, match=said):
        architecture(config).parse(config)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *[({"rope_theta": value}, "rope_theta is") for value in (0, -1, float("nan"), 1e-300, True, "1e4", 10**400)],
        *[({"rope_parameters": {"rope_theta": value}}, "rope_parameters.rope_theta") for value in (0, True, [1])],
        *[({"rope_scaling": {**LINEAR, "factor": value}}, "rope_scaling.factor is") for value in (0, True, float("inf"), "2")],
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is null; expected a number"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor is 4.0; expected more than low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}}, "original_max_position_embeddings is null"),
        ({"rope_scaling": {**LINEAR, "mscale": 0.7}}, r"rope_scaling.mscale is 0.7; expected nothing"),
        ({"rope_scaling": {**LINEAR, "type": "llama3"}}, "rope_scaling.type is"),
        ({"rope_scaling": LINEAR, "rope_parameters": LLAMA3}, "rope_parameters and rope_scaling say different things"),
        ({"rope_scaling": [2.0]}, "rope_scaling is .*; expected an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling.rope_type is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"rope_traditional": True}, "rope_traditional is true"),
        *[({"rms_norm_eps": value}, "rms_norm_eps is") for value in (True, 10**400, 1e-300, 0, "1e-5", [1e-5])],
        *[({"tie_word_embeddings": value}, "tie_word_embeddings is") for value in ("false", 0, 1, [])],
        ({"attention_bias": "no"}, "attention_bias is"),
        *[({key: value}, f"{key} is") for key in ("eos_token_id", "bos_token_id")
          for value in (-1, [1, -1], 1.7, True, 512, "2", {}, [[1]])],
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected an integer from 1 to 4,096"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000; expected"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": 128.0}, "hidden_size is 128.0"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": 7}, "layer_types is 7"),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": [["x"], "full_attention"]}, "layer_types is"),
        ({"model_type": "qwen3", "use_sliding_window": "no", "sliding_window": 64}, "use_sliding_window is"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": "1"}, "max_window_layers"),
        ({"model_type": "qwen3", "head_dim": 0}, "head_dim is 0"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_by_name(change: dict, said: str) -> None:
    config = {**BASE, **change}
    with pytest.raises(CheckpointError, match=said):
        architecture(config).parse(config)


def test_a_value_that_is_long_is_cut_short() -> None:
    with pytest.raises(CheckpointError) as caught:
        llama.parse({**BASE, "eos_token_id": ["x" * 100_000]})
    assert len(str(caught.value)) < 300


def test_null_is_absent_and_both_spellings_may_agree() -> None:
    scaling = {**LINEAR, "rope_theta": 5e5, "mscale": None}
    parsed = llama.parse({**BASE, "rope_theta": None, "rope_scaling": scaling, "rope_parameters": scaling, "eos_token_id": None})
    assert (parsed.rope.theta, parsed.rope.factor, parsed.eos_token_ids) == (5e5, 2.0, ())


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA32 = {
    **SMOLLM2, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "rope_theta": 500000.0,
    "vocab_size": 128256,
}  # fmt: skip
QWEN3 = {
    **SMOLLM2, "model_type": "qwen3", "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 1024,
    "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL = {
    **SMOLLM2, "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize("config", [SMOLLM2, LLAMA32, QWEN3, MISTRAL], ids=["smollm2", "llama32", "qwen3", "mistral"])
def test_configs_of_the_hub_are_taken(config: dict) -> None:
    parsed = architecture(config).parse(config)
    assert parsed.layers == config["num_hidden_layers"]
    assert parsed.rope.theta == config["rope_theta"]
    # And as transformers 5 writes it again.
    ours = transformers.AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    again = ours.to_dict()
    assert architecture(again).parse(again) == parsed
