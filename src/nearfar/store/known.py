"""Short names of popular models, each with a quantization that still answers well at that size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A known model: its hub id, and the quantization of its weights."""

    source: str
    quant: str


KNOWN = {
    "smollm2:135m": Known("HuggingFaceTB/SmolLM2-135M-Instruct", "q8"),
    "smollm2:360m": Known("HuggingFaceTB/SmolLM2-360M-Instruct", "q8"),
    "smollm2:1.7b": Known("HuggingFaceTB/SmolLM2-1.7B-Instruct", "q4"),
    "smollm3:3b": Known("HuggingFaceTB/SmolLM3-3B", "q4"),
    "qwen2.5:0.5b": Known("Qwen/Qwen2.5-0.5B-Instruct", "q8"),
    "qwen2.5:1.5b": Known("Qwen/Qwen2.5-1.5B-Instruct", "q4"),
    "qwen3:0.6b": Known("Qwen/Qwen3-0.6B", "q8"),
    "qwen3:1.7b": Known("Qwen/Qwen3-1.7B", "q4"),
    "qwen3:4b": Known("Qwen/Qwen3-4B", "q4"),
    "llama3.2:1b": Known("meta-llama/Llama-3.2-1B-Instruct", "q4"),
    "llama3.2:3b": Known("meta-llama/Llama-3.2-3B-Instruct", "q4"),
    "gemma3:1b": Known("google/gemma-3-1b-it", "q4"),
    "phi4-mini": Known("microsoft/Phi-4-mini-instruct", "q4"),
    "granite3.3:2b": Known("ibm-granite/granite-3.3-2b-instruct", "q4"),
}
