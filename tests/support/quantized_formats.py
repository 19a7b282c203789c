"""A tiny checkpoint in each format, made from the format's published description: tensors, settings, and the
weights that they represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.quantized import (
    CONFIG,
    Array,
    Integers,
    linear,
    pack_words,
    to_integers,
    weights,
    write,
    write_mlc,
)

EXACT, ROUNDED, ANEW = "exact", "codes exact, offsets rounded", "requantized"


@dataclass(frozen=True)
class Made:
    """A checkpoint and the expected results: `floats` are the values of every matrix; `kept` says how a build
    keeps its matrices; `step`: the most by which weights may differ, as a part of a step.
    """

    config: dict[str, Any]
    tensors: dict[str, Array]
    floats: dict[str, Array]
    kept: str
    step: float = 0.0
    mlc: bool = False

    def write(self, path: Path) -> Path:
        """Write the checkpoint into a new directory."""
        return (write_mlc if self.mlc else write)(path, self.config, self.tensors)

    @property
    def quantized(self) -> list[str]:
        """The names of the quantized matrices."""
        return [name for name in self.floats if linear(name) or (self.mlc and self.floats[name].ndim == 2)]


def made(
    settings: Mapping[str, Any],
    store: Callable[[str, Array], tuple[dict[str, Array], Array]],
    kept: str,
    step: float = 0.0,
) -> Made:
    """Make a checkpoint in which `store` converts each matrix of a layer to its tensors and the weights that
    they represent; other tensors are float16.
    """
    tensors: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    for name, value in weights().items():
        if linear(name):
            stored, floats[name] = store(name.removesuffix(".weight"), value)
            tensors |= stored
        else:
            tensors[name] = value.astype(np.float16)
            floats[name] = tensors[name].astype(np.float32)
    return Made({**CONFIG, "quantization_config": dict(settings)}, tensors, floats, kept, step)


def awq(group: int = 64) -> Made:
    """https://github.com/casper-hansen/AutoAWQ: awq/modules/linear/gemm.py."""

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        found = to_integers(weight, 4, group if group > 0 else weight.shape[1])
        return {
            f"{base}.qweight": pack_words(found.codes.T, 4, (0, 2, 4, 6, 1, 3, 5, 7)),
            f"{base}.qzeros": pack_words(found.zeros.T, 4, (0, 2, 4, 6, 1, 3, 5, 7)),
            f"{base}.scales": found.scales.T,
        }, found.weights()

    settings = {
        "quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    return made(settings, store, ROUNDED, 0.0075)


def gptq(
    bits: int = 4, group: int = 64, symmetric: bool = False, stored: str = "gptq", order: str = "in order"
) -> Made:
    """https://github.com/AutoGPTQ/AutoGPTQ: nn_modules/qlinear/qlinear_cuda_old.py. `order` of the inputs'
    groups: in order, scattered, or absent.
    """

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        size = group if group > 0 else weight.shape[1]
        found = to_integers(weight, bits, size, symmetric)
        k = weight.shape[1]
        groups = np.arange(k) // size
        if order == "scattered":
            groups = np.random.default_rng(k).permutation(groups)
            found = _scattered(weight, found, groups, bits)
        less = 1 if stored == "gptq" else 0
        out = {
            f"{base}.qweight": pack_words(found.codes, bits).T,
            f"{base}.qzeros": pack_words((found.zeros.T - less) % 2**bits, bits),
            f"{base}.scales": found.scales.T,
            f"{base}.bias": np.zeros(len(weight), np.float16),
        }
        if order != "not said":
            out[f"{base}.g_idx"] = groups.astype(np.int32)
        return out, found.weights(groups)

    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "damp_percent": 0.1,
        "desc_act": order == "scattered", "checkpoint_format": stored, "true_sequential": True,
    }  # fmt: skip
    if order == "scattered":
        return made(settings, store, ANEW)
    return made(settings, store, *((EXACT, 0.0) if symmetric else (ROUNDED, 0.13 if bits == 8 else 0.0075)))


def _scattered(weight: Array, found: Integers, groups: Array, bits: int) -> Integers:
    """Codes with the same scales, where inputs belong to other groups."""
    scales, zeros = found.scales[:, groups].astype(np.float32), found.zeros[:, groups]
    codes = np.clip(np.round(weight / scales) + zeros, 0, 2**bits - 1).astype(np.int64)
    return Integers(codes, found.zeros, found.scales)


def compressed(
    bits: int = 4,
    group: int = 64,
    kind: str = "pack-quantized",
    asymmetric: bool = False,
    apart: bool = False,
    dtype: Any = ml_dtypes.bfloat16,
    zeros: bool = False,
) -> Made:
    """https://github.com/vllm-project/compressed-tensors: compressors/pack_quantized, naive_quantized.
    `group` 0: one scale for each row; `apart`: no value crosses a word, as in older versions;
    `zeros`: zero points are stored even if all are 0.
    """

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        n, k = weight.shape
        found = to_integers(weight, bits, group or k, not asymmetric, dtype)
        half = 2 ** (bits - 1)
        out = {f"{base}.weight_scale": found.scales}
        if kind == "int-quantized":
            out[f"{base}.weight"] = (found.codes - half).astype(np.int8)
            if asymmetric or zeros:
                out[f"{base}.weight_zero_point"] = (found.zeros - half).astype(np.int8)
            return out, found.weights()
        pack = _apart if apart else pack_words
        out[f"{base}.weight_packed"] = pack(found.codes, bits)
        out[f"{base}.weight_shape"] = np.array([n, k], np.int64)
        if asymmetric or zeros:
            out[f"{base}.weight_zero_point"] = pack(found.zeros.T, bits).T
        return out, found.weights()

    weights = {
        "num_bits": bits, "type": "int", "symmetric": not asymmetric, "dynamic": False, "actorder": None,
        "strategy": "group" if group else "channel", "group_size": group or None, "block_structure": None,
    }  # fmt: skip
    return made(_groups(kind, weights), store, *((ROUNDED, 0.13) if asymmetric else (EXACT, 0.0)))


def _groups(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def _apart(values: Array, bits: int) -> Array:
    """Pack as many whole values into a word as fit."""
    in_word = 32 // bits
    rows, m = values.shape
    padded = np.zeros((rows, -(-m // in_word) * in_word), np.int64)
    padded[:, :m] = values
    words = (padded.reshape(rows, -1, in_word) << (np.arange(in_word) * bits)).sum(2)
    return words.astype(np.uint32).view(np.int32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp4(kind: str) -> Made:
    """https://github.com/vllm-project/compressed-tensors: compressors/nvfp4, mxfp4."""
    nv = kind == "nvfp4-pack-quantized"
    group = 16 if nv else 32

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        n, k = weight.shape
        wide = weight.reshape(n, -1, group)
        largest = np.abs(wide).max(2)
        out: dict[str, Array] = {}
        if nv:
            divisor = np.float32(448 * 6 / largest.max())
            stored = (largest / 6 * divisor).astype(ml_dtypes.float8_e4m3fn)
            scales = stored.astype(np.float32) / divisor
            out[f"{base}.weight_global_scale"] = np.array([divisor], np.float32)
            out[f"{base}.input_global_scale"] = np.ones(1, np.float32)
            out[f"{base}.weight_scale"] = stored
        else:
            exponents = np.floor(np.log2(largest)).astype(np.int64) - 2
            scales = np.exp2(exponents).astype(np.float32)
            out[f"{base}.weight_scale"] = (exponents + 127).astype(np.uint8)
        codes = np.abs((wide / scales[..., None])[..., None] - E2M1).argmin(3)
        pairs = codes.reshape(n, -1, 2)
        out[f"{base}.weight_packed"] = (pairs[..., 0] + 16 * pairs[..., 1]).astype(np.uint8)
        return out, (E2M1[codes] * scales[..., None]).reshape(n, k)

    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "group_size": group,
        "strategy": "tensor_group" if nv else "group",
    }  # fmt: skip
    return made(_groups(kind, weights), store, *((ROUNDED, 0.018) if nv else (EXACT, 0.0)))


def float8(settings: Mapping[str, Any], scale: str, by: str, block: int = 128) -> Made:
    """The model cards of DeepSeek-V3 (blocks) and RedHatAI's FP8 models (rows, tensors). `by`: the unit that
    has a scale.
    """

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        n, k = weight.shape
        rows, columns = {"block": (block, block), "row": (1, k), "tensor": (n, k)}[by]
        blocks = (-(-n // rows), -(-k // columns))
        scales = np.zeros(blocks, np.float32)
        floats, values = np.zeros((n, k), np.float32), np.zeros((n, k), ml_dtypes.float8_e4m3fn)
        for i, j in np.ndindex(blocks):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = np.abs(weight[part]).max() / 448
            values[part] = (weight[part] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            floats[part] = values[part].astype(np.float32) * scales[i, j]
        shaped = scales.reshape(1) if by == "tensor" else scales
        return {
            f"{base}.weight": values, f"{base}.{scale}": shaped,
            f"{base}.input_scale": np.ones(1, np.float32),
        }, floats  # fmt: skip

    return made(settings, store, ANEW)


DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
FLOAT8 = _groups(
    "float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
)


NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""Dettmers et al., QLoRA, 2023, appendix E."""


def nf4(nested: bool = False) -> Made:
    """https://github.com/bitsandbytes-foundation/bitsandbytes: functional.py, QuantState.as_dict."""

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        values = np.array(NF4, np.float32)
        blocks = weight.reshape(-1, 64)
        factors = np.abs(blocks).max(1).astype(np.float32)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape),
        }  # fmt: skip
        out = {f"{base}.weight.quant_map": values}
        if nested:
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            offset = float(factors.mean())
            count = -(-len(factors) // 256)
            outer = np.array([np.abs(factors[i * 256 : (i + 1) * 256] - offset).max() for i in range(count)])
            outer = outer.astype(np.float32)
            of = np.arange(len(factors)) // 256
            stored = np.abs((factors - offset)[:, None] / outer[of][:, None] - table).argmin(1)
            factors = table[stored] * outer[of] + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            out |= {
                f"{base}.weight.absmax": stored.astype(np.uint8),
                f"{base}.weight.nested_absmax": outer,
                f"{base}.weight.nested_quant_map": table,
            }
        else:
            out[f"{base}.weight.absmax"] = factors
        codes = np.abs((blocks / factors[:, None])[:, :, None] - values).argmin(2)
        pairs = codes.reshape(-1, 2)
        out[f"{base}.weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).astype(np.uint8)
        text = json.dumps(state).encode()
        out[f"{base}.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
        return out, (values[codes] * factors[:, None]).reshape(weight.shape)

    settings = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    return made(settings, store, ANEW)


def int8() -> Made:
    """LLM.int8() as bitsandbytes' Linear8bitLt saves it."""

    def store(base: str, weight: Array) -> tuple[dict[str, Array], Array]:
        largest = np.abs(weight).max(1).astype(np.float32)
        values = np.round(weight / largest[:, None] * 127).astype(np.int8)
        out = {
            f"{base}.weight": values, f"{base}.SCB": largest,
            f"{base}.weight_format": np.array(0, np.uint8),
        }  # fmt: skip
        return out, (values * (largest[:, None].astype(np.float64) / 127)).astype(np.float32)

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    return made(settings, store, ROUNDED, 0.07)


def mlc(name: str = "q4f16_1", inner: int = CONFIG["intermediate_size"]) -> Made:
    """https://github.com/mlc-ai/mlc-llm: quantization/group_quantization.py, model/llama/llama_loader.py."""
    bits, group = (3, 40) if name.startswith("q3") else (4, 32)
    dtype = np.float32 if "f32" in name else np.float16
    plain = weights({**CONFIG, "intermediate_size": inner})
    tensors: dict[str, Array] = {}
    floats: dict[str, Array] = {}

    def store(base: str, parts: list[str]) -> None:
        weight = np.concatenate([plain[part] for part in parts])
        n, k = weight.shape
        padded = np.zeros((n, -(-k // group) * group), np.float32)
        padded[:, :k] = weight
        wide, top = padded.reshape(n, -1, group), 2 ** (bits - 1) - 1
        scales = (np.abs(wide).max(2) / top).astype(dtype)
        if dtype == np.float32:  # published files store these scales as bfloat16
            scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
        codes = np.clip(np.round(wide / scales[..., None].astype(np.float32)) + top, 0, 2 * top)
        found = Integers(codes.astype(np.int64).reshape(n, -1), np.full(scales.shape, top), scales)
        tensors[f"{base}.q_weight"] = _apart(found.codes, bits).view(np.uint32)
        tensors[f"{base}.q_scale"] = scales
        rows = np.cumsum([0] + [len(plain[part]) for part in parts])
        whole = found.weights()[:, :k]
        floats.update({part: whole[rows[i] : rows[i + 1]] for i, part in enumerate(parts)})

    for layer in range(CONFIG["num_hidden_layers"]):
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        store(f"{attn}.qkv_proj", [f"{attn}.{part}_proj.weight" for part in "qkv"])
        store(f"{mlp}.gate_up_proj", [f"{mlp}.{part}_proj.weight" for part in ("gate", "up")])
        store(f"{attn}.o_proj", [f"{attn}.o_proj.weight"])
        store(f"{mlp}.down_proj", [f"{mlp}.down_proj.weight"])
    for base in ("model.embed_tokens", "lm_head"):
        store(base, [f"{base}.weight"])
    for key, value in plain.items():
        if value.ndim == 1:
            tensors[key] = value.astype(dtype)
            floats[key] = value
    shape = {
        **{key: value for key, value in CONFIG.items() if key not in ("model_type", "rope_theta")},
        "intermediate_size": inner, "position_embedding_base": 10000.0, "context_window_size": 160,
        "prefill_chunk_size": 64, "tensor_parallel_shards": 1, "max_batch_size": 80,
    }  # fmt: skip
    del shape["max_position_embeddings"], shape["bos_token_id"], shape["eos_token_id"]
    config = {
        "version": "0.1.0", "model_type": "llama", "quantization": name, "model_config": shape,
        "vocab_size": CONFIG["vocab_size"], "bos_token_id": 256, "eos_token_id": [257],
    }  # fmt: skip
    kept, step = (ANEW, 0.0) if bits == 3 or inner % group else (ROUNDED, 0.0045)
    return Made(config, tensors, floats, kept, step, mlc=True)


FORMATS: dict[str, Callable[[], Made]] = {
    "awq": awq,
    "awq-rows": lambda: awq(-1),
    "gptq": gptq,
    "gptq-symmetric": lambda: gptq(symmetric=True),
    "gptq_v2-symmetric-rows": lambda: gptq(group=-1, symmetric=True, stored="gptq_v2", order="not said"),
    "gptq-2": lambda: gptq(2, 32),
    "gptq-3": lambda: gptq(3, 32),
    "gptq_v2-8": lambda: gptq(8, stored="gptq_v2"),
    "gptq-scattered": lambda: gptq(order="scattered"),
    "pack-quantized": compressed,
    "pack-quantized-asymmetric": lambda: compressed(asymmetric=True),
    "pack-quantized-3": lambda: compressed(3, 32),
    "pack-quantized-3-apart": lambda: compressed(3, 32, apart=True, asymmetric=True),
    "pack-quantized-8-rows": lambda: compressed(8, 0),
    "pack-quantized-zeros": lambda: compressed(zeros=True),
    "int-quantized": lambda: compressed(8, 0, "int-quantized"),
    "int-quantized-zeros": lambda: compressed(8, 0, "int-quantized", zeros=True),
    "int-quantized-asymmetric": lambda: compressed(8, 64, "int-quantized", asymmetric=True),
    "nvfp4-pack-quantized": lambda: fp4("nvfp4-pack-quantized"),
    "mxfp4-pack-quantized": lambda: fp4("mxfp4-pack-quantized"),
    "float-quantized": lambda: float8(FLOAT8, "weight_scale", "row"),
    "fp8-blocks": lambda: float8(DEEPSEEK, "weight_scale_inv", "block"),
    "fp8": lambda: float8({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", "tensor"),
    "nf4": nf4,
    "nf4-nested": lambda: nf4(nested=True),
    "int8": int8,
    "mlc": mlc,
    "mlc-float32": lambda: mlc("q4f32_1"),
    "mlc-3": lambda: mlc("q3f16_1"),
}
"""Functions that make a checkpoint, by name of the format."""
CENTRED = (
    "gptq-symmetric", "gptq_v2-symmetric-rows", "pack-quantized", "pack-quantized-3", "pack-quantized-8-rows",
    "pack-quantized-zeros", "int-quantized", "int-quantized-zeros", "int8",
)  # fmt: skip
"""Formats whose scales need no offsets: one code stands for 0 in every group."""
RUN = (
    "awq", "gptq-symmetric", "gptq-3", "gptq-scattered", "pack-quantized", "int-quantized", "fp8-blocks",
    "nf4-nested", "int8", "mlc", "nvfp4-pack-quantized",
)  # fmt: skip
"""Formats that are also built and run: one of each kind."""
