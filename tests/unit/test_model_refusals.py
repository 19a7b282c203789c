"""Settings of configs beyond llama's that are not supported are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from nearfar.build.unread import check_unread
from nearfar.errors import CheckpointError
from nearfar.step.reading import read_model
from tests.support.architectures import CASES

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2-plain", {"use_bidirectional_attention": True},
     r"use_bidirectional_attention is true, so it is an encoder"),
    ("gemma2-plain", {"hidden_activation": "relu"}, r"hidden_activation is \"relu\"; expected silu or"),
    ("gemma2-plain", {"sliding_window": None}, r"layer_types is null; expected full_attention alone"),
    ("gemma2-plain", {"final_logit_softcapping": 0},
     r"final_logit_softcapping is 0; expected a number from 0.001"),
    ("gemma3_text-plain", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0; expected null"),
    ("gemma3_text-plain", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is true"),
    ("gemma3_text-plain", {"layer_types": ["chunked_attention"] * 7}, r"layer_types is .*; expected 7 times"),
    ("gemma3_text-plain",
     {"rope_parameters": {"sliding_attention": {}, "full_attention": {"rope_type": "wobbly"}}},
     r"rope_parameters.full_attention.rope_type is \"wobbly\""),
    ("olmo3-yarn", {"rope_parameters": None, "rope_theta": 1e4},
     r"rope_theta is 10000.0; expected 500000, or"),
    ("exaone4-hybrid", {"sliding_window_pattern": "LLLG"},
     r"sliding_window_pattern is \"LLLG\"; expected an integer"),
    ("glm4-plain", {"num_key_value_heads": 3}, r"4 attention heads cannot share 3 key/value heads evenly"),
    ("gemma4_text-shared", {"enable_moe_block": True}, r"moe_intermediate_size is null; expected an integer"),
    ("gemma4_text-shared", {"attention_k_eq_v": 1}, r"attention_k_eq_v is 1; expected true or false"),
    ("granitemoehybrid-dense", {"position_embedding_type": "alibi"},
     r"position_embedding_type is \"alibi\"; expected rope or nope"),
    ("gemma4_text-shared", {"use_bidirectional_attention": "all"},
     r"use_bidirectional_attention is \"all\", so it is"),
    ("gemma4_text-shared", {"num_kv_shared_layers": 7}, r"num_kv_shared_layers is 7; expected so few"),
    ("gemma4_text-shared", {"vocab_size_per_layer_input": 99},
     r"vocab_size_per_layer_input is 99; expected vocab_size"),
    ("gemma4_text-shared", {"per_layer_config": {"2": {"head_dim": 32, "hidden_act": "silu"}}},
     r"per_layer_config.2.hidden_act is \"silu\"; expected head_dim and num_key_value_heads only"),
    ("gemma4_text-shared", {"per_layer_config": {"8": {"head_dim": 32}}},
     r"per_layer_config.8 .* layers from 0 to 7"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "said"), REFUSED)
def test_refused_by_name(name: str, change: dict[str, Any], said: str) -> None:
    case = next(case for case in CASES if str(case) == name)
    config = {**case.config, "model_type": case.model_type}
    reading = read_model(config)
    check_unread(reading.config, reading.model_type)  # the unchanged config is accepted
    with pytest.raises(CheckpointError, match=said):
        read_model({**config, **change})
