"""Reading config.json: shapes, rope frequencies as transformers computes them, refusals."""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nearfar.build.models import architecture, llama
from nearfar.errors import CheckpointError

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
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ],
)
def test_unsupported_values_are_named(change: dict, said: str) -> None:
    config = {**BASE, **change}
    with pytest.raises(CheckpointError, match=said):
        architecture(config).parse(config)
