"""Short names of popular models, each with its size and a quantization that still answers well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """A known model: its hub id, the quantization of its weights (None: a quantized checkpoint keeps its
    codes), and its parameters in millions, without those of parts that are not built. `shape`: the file in
    build/shapes with its config.
    """

    source: str
    quant: str | None
    millions: int
    shape: str


KNOWN = {
    "ernie4.5:0.3b": KnownModel("baidu/ERNIE-4.5-0.3B-PT", "q8", 361, "ernie-4.5-0.3b"),
    "gemma2:2b": KnownModel("google/gemma-2-2b-it", "q4", 2614, "gemma-2-2b"),
    "gemma3:270m": KnownModel("google/gemma-3-270m-it", "q8", 268, "gemma-3-270m"),
    "gemma3:1b": KnownModel("google/gemma-3-1b-it", "q4", 1000, "gemma-3-1b"),
    "gemma3:4b": KnownModel("google/gemma-3-4b-it", "q4", 3880, "gemma-3-4b"),
    "gemma4:e2b": KnownModel("google/gemma-4-E2B-it", "q4", 4629, "gemma-4-e2b"),
    "gemma4:e4b": KnownModel("google/gemma-4-E4B-it", "q4", 7463, "gemma-4-e4b"),
    "gpt-oss:20b": KnownModel("openai/gpt-oss-20b", None, 20915, "gpt-oss-20b"),
    "granite3.3:2b": KnownModel("ibm-granite/granite-3.3-2b-instruct", "q4", 2534, "granite-3.3-2b"),
    "granite4:350m": KnownModel("ibm-granite/granite-4.0-350m", "q8", 352, "granite-4.0-350m"),
    "granite4:1b": KnownModel("ibm-granite/granite-4.0-1b", "q4", 1632, "granite-4.0-1b"),
    "granite4:micro": KnownModel("ibm-granite/granite-4.0-micro", "q4", 3403, "granite-4.0-micro"),
    "hunyuan:1.8b": KnownModel("tencent/Hunyuan-1.8B-Instruct", "q4", 1791, "hunyuan-1.8b"),
    "hunyuan:4b": KnownModel("tencent/Hunyuan-4B-Instruct", "q4", 4222, "hunyuan-4b"),
    "lfm2:8b-a1b": KnownModel("LiquidAI/LFM2-8B-A1B", "q4", 8340, "lfm2-8b-a1b"),
    "lfm2.5:350m": KnownModel("LiquidAI/LFM2.5-350M", "q8", 354, "lfm2.5-350m"),
    "lfm2.5:1.2b": KnownModel("LiquidAI/LFM2.5-1.2B-Instruct", "q4", 1170, "lfm2.5-1.2b"),
    "llama3.2:1b": KnownModel("meta-llama/Llama-3.2-1B-Instruct", "q4", 1236, "llama-3.2-1b"),
    "llama3.2:3b": KnownModel("meta-llama/Llama-3.2-3B-Instruct", "q4", 3213, "llama-3.2-3b"),
    "ministral3:3b": KnownModel("mistralai/Ministral-3-3B-Instruct-2512", "q4", 3429, "ministral-3-3b"),
    "olmo2:1b": KnownModel("allenai/OLMo-2-0425-1B-Instruct", "q4", 1485, "olmo-2-1b"),
    "olmo3:7b": KnownModel("allenai/Olmo-3-7B-Instruct", "q4", 7298, "olmo-3-7b"),
    "phi3.5-mini": KnownModel("microsoft/Phi-3.5-mini-instruct", "q4", 3821, "phi-3.5-mini"),
    "phi4-mini": KnownModel("microsoft/Phi-4-mini-instruct", "q4", 3836, "phi-4-mini"),
    "qwen2.5:0.5b": KnownModel("Qwen/Qwen2.5-0.5B-Instruct", "q8", 494, "qwen2.5-0.5b"),
    "qwen2.5:1.5b": KnownModel("Qwen/Qwen2.5-1.5B-Instruct", "q4", 1544, "qwen2.5-1.5b"),
    "qwen2.5:3b": KnownModel("Qwen/Qwen2.5-3B-Instruct", "q4", 3086, "qwen2.5-3b"),
    "qwen3:0.6b": KnownModel("Qwen/Qwen3-0.6B", "q8", 596, "qwen3-0.6b"),
    "qwen3:1.7b": KnownModel("Qwen/Qwen3-1.7B", "q4", 1721, "qwen3-1.7b"),
    "qwen3:4b": KnownModel("Qwen/Qwen3-4B", "q4", 4022, "qwen3-4b"),
    "qwen3-vl:2b": KnownModel("Qwen/Qwen3-VL-2B-Instruct", "q4", 1721, "qwen3-vl-2b"),
    "qwen3-vl:4b": KnownModel("Qwen/Qwen3-VL-4B-Instruct", "q4", 4022, "qwen3-vl-4b"),
    "qwen3.5:0.8b": KnownModel("Qwen/Qwen3.5-0.8B", "q8", 752, "qwen3.5-0.8b"),
    "qwen3.5:35b-a3b": KnownModel("Qwen/Qwen3.5-35B-A3B", "q4", 34661, "qwen3.5-35b-a3b"),
    "smollm2:135m": KnownModel("HuggingFaceTB/SmolLM2-135M-Instruct", "q8", 135, "smollm2-135m"),
    "smollm2:360m": KnownModel("HuggingFaceTB/SmolLM2-360M-Instruct", "q8", 362, "smollm2-360m"),
    "smollm2:1.7b": KnownModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", "q4", 1711, "smollm2-1.7b"),
    "smollm3:3b": KnownModel("HuggingFaceTB/SmolLM3-3B", "q4", 3075, "smollm3-3b"),
}
"""The known models, by their short names."""
