"""Tiny configs of models with short convolutions, delta rules and state spaces: see architectures.py."""

from __future__ import annotations

from typing import Any

from tests.support.cases import GLOBAL, MULTIPLIED, OWN, case, inside

CONV, LINEAR_ATTENTION = "conv", "linear_attention"
LFM2: dict[str, Any] = {"block_multiple_of": 20, "rms_norm_eps": OWN, "norm_eps": 0.01, "hidden_size": 64}
LFM2S = [
    case("lfm2", "plain", **LFM2, head_dim=OWN, tie_word_embeddings=True, num_hidden_layers=4,
         layer_types=[CONV, CONV, GLOBAL, CONV]),
    case("lfm2", "biased", **LFM2, head_dim=24, conv_bias=True, conv_L_cache=5, full_attn_idxs=[1],
         block_ffn_dim_multiplier=1.3, prompts=(3, 45)),
    case("lfm2_moe", "plain", **{**LFM2, "block_multiple_of": OWN}, head_dim=OWN, num_hidden_layers=4,
         num_dense_layers=1, layer_types=[CONV, CONV, GLOBAL, CONV], num_experts=9, num_experts_per_tok=3,
         moe_intermediate_size=20, tie_word_embeddings=True),
    case("lfm2_moe", "odd", **{**LFM2, "block_multiple_of": OWN}, head_dim=24, conv_bias=True,
         num_dense_layers=0, layer_types=[GLOBAL, CONV, CONV], num_experts=6, num_experts_per_tok=2,
         moe_intermediate_size=37, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=2.5),
    case("lfm2", "convs", **LFM2, head_dim=OWN, layer_types=[CONV, CONV, CONV]),
    case("lfm2", "deep", **{**LFM2, "hidden_size": 40}, conv_L_cache=20, layer_types=[GLOBAL, CONV, CONV],
         block_auto_adjust_ff_dim=False, prompts=(9, 70)),
]  # fmt: skip

QWEN3_5: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "max_position_embeddings": 700,
}  # fmt: skip
MROPE_3_5 = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
         "partial_rotary_factor": 0.25}  # fmt: skip
DELTAS = [
    case("qwen3_5_text", "plain", **QWEN3_5, num_hidden_layers=4, rope_parameters=MROPE_3_5,
         prompts=(9, 45, 300)),
    case("qwen3_5_text", "odd", **{**QWEN3_5, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
         "linear_value_head_dim": 20, "linear_conv_kernel_dim": 3}, head_dim=32, attention_bias=True,
         tie_word_embeddings=True, layer_types=[LINEAR_ATTENTION, GLOBAL, LINEAR_ATTENTION]),
]  # fmt: skip
EXPERTS_3_5: dict[str, Any] = {"intermediate_size": OWN, "shared_expert_intermediate_size": 36}
DELTAS += [
    case("qwen3_5_moe_text", "plain", **QWEN3_5, **EXPERTS_3_5, num_hidden_layers=4, num_experts=9,
         num_experts_per_tok=3, moe_intermediate_size=20, rope_parameters=MROPE_3_5, prompts=(9, 45, 300)),
    case("qwen3_5_moe_text", "odd", **{**QWEN3_5, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
         "linear_value_head_dim": 20, "linear_conv_kernel_dim": 3}, **EXPERTS_3_5, head_dim=32,
         attention_bias=True, tie_word_embeddings=True, num_experts=5, num_experts_per_tok=5,
         moe_intermediate_size=17, layer_types=[LINEAR_ATTENTION, GLOBAL, LINEAR_ATTENTION]),
]  # fmt: skip
VISION_3_5 = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48,
    "patch_size": 4, "num_position_embeddings": 16, "model_type": "qwen3_5",
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "hidden_size": 64, "head_dim": OWN, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_expand": 2, "max_position_embeddings": 700, "mamba_chunk_size": 32,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2,
    "layer_norm_epsilon": 0.01, "num_hidden_layers": OWN, "max_position_embeddings": 700, "chunk_size": 32,
    "rms_norm_eps": OWN,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_ssm": 80, "max_position_embeddings": 700,
    "mamba_chunk_size": 32, "num_hidden_layers": 2,
}  # fmt: skip
FACTORS: dict[str, Any] = {
    "lm_head_multiplier": 0.4, "embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 1.6],
    "key_multiplier": 0.35, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 1.4, 0.8, 1.2, 0.6],
}  # fmt: skip
STATE_SPACES = [
    case("granitemoehybrid", "mamba", **MULTIPLIED, **MAMBA, num_hidden_layers=4, num_local_experts=0,
         num_experts_per_tok=0, shared_intermediate_size=100, tie_word_embeddings=True,
         layer_types=[LINEAR_ATTENTION, LINEAR_ATTENTION, GLOBAL, LINEAR_ATTENTION], prompts=(9, 45, 300)),
    case("granitemoehybrid", "odd", **{**MAMBA, "hidden_size": 72, "mamba_n_heads": 6, "mamba_d_state": 12,
         "mamba_n_groups": 3}, num_local_experts=5, num_experts_per_tok=2, intermediate_size=24,
         shared_intermediate_size=44, mamba_d_conv=3, mamba_conv_bias=False, mamba_proj_bias=True,
         attention_bias=True, time_step_limit=[0.3, 1.1], position_embedding_type="rope",
         residual_multiplier=0.5, layer_types=[LINEAR_ATTENTION, GLOBAL, LINEAR_ATTENTION], prompts=(9, 70)),
    case("nemotron_h", "plain", **NEMOTRON, layers_block_type=[LINEAR_ATTENTION, "mlp", GLOBAL, "mlp"],
         prompts=(9, 45, 300)),
    case("nemotron_h", "odd", **{**NEMOTRON, "mamba_head_dim": 20, "mamba_num_heads": 9, "n_groups": 3},
         hybrid_override_pattern="M-*MM", use_bias=True, mlp_bias=True, use_conv_bias=False, conv_kernel=2,
         time_step_min=0.2, mlp_hidden_act="gelu"),
    case("nemotron_h", "experts", **NEMOTRON, layers_block_type=[LINEAR_ATTENTION, "moe", GLOBAL, "moe"],
         n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=36, routed_scaling_factor=2.5,
         moe_shared_expert_intermediate_size=28),
    case("nemotron_h", "latent", **NEMOTRON, layers_block_type=["moe", LINEAR_ATTENTION, GLOBAL, "mlp"],
         n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=19, moe_latent_size=24,
         moe_shared_expert_intermediate_size=40, mlp_bias=True, norm_topk_prob=False),
    case("falcon_h1", "plain", **FALCON, prompts=(9, 45, 300)),
    case("falcon_h1", "multiplied", **{**FALCON, "mamba_d_ssm": 96}, mamba_n_groups=2,
         mamba_rms_norm=True, mamba_norm_before_gate=True, **FACTORS, tie_word_embeddings=True),
    case("falcon_h1", "biased", **{**FALCON, "mamba_d_ssm": None}, mamba_rms_norm=True,
         mamba_norm_before_gate=False, mamba_proj_bias=True, projectors_bias=True, attention_bias=True,
         mlp_bias=True, mamba_conv_bias=False, time_step_limit=[0.1, 0.9], **FACTORS),
    case("falcon_h1", "bare", **{**FALCON, "mamba_n_heads": 8}, projectors_bias=True, **FACTORS),
]  # fmt: skip
PATCHES_OF_LFM2 = {
    "model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "patch_size": 4, "num_patches": 16,
}  # fmt: skip
RECURRENT = [
    *LFM2S, *DELTAS, *STATE_SPACES,
    inside("lfm2_vl", LFM2S[0], PATCHES_OF_LFM2, tie_word_embeddings=True, image_token_id=260),
    inside("qwen3_5", DELTAS[1], VISION_3_5, tie_word_embeddings=True, image_token_id=260, video_token_id=259,
           vision_start_token_id=258, vision_end_token_id=255),
    inside("qwen3_5_moe", DELTAS[3], {**VISION_3_5, "model_type": "qwen3_5_moe"}, tie_word_embeddings=True,
           image_token_id=260, video_token_id=259, vision_start_token_id=258, vision_end_token_id=255),
]  # fmt: skip
