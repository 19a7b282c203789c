"""onnxruntime-genai loads the onnx target's directory unmodified, and gives the expected text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared_data
from tests.support.artifacts import Built, reference

og: Any = pytest.importorskip(
    "onnxruntime_genai", reason="needs onnxruntime-genai (pip install 'nearfar[dev]')"
)


def said(root: Path, tokens: list[int], new: int) -> str:
    """The model's greedy text after a prompt's tokens, without the prompt."""
    model = og.Model(str(root))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(tokens) + new, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(tokens)
    out: list[int] = []
    while not generator.is_done():
        generator.generate_next_token()
        out.append(int(generator.get_next_tokens()[0]))
    text: str = og.Tokenizer(model).decode(out)
    return text


def test_a_dense_directory_tells_the_golden_story(built: Built) -> None:
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    assert said(built("stories260K", "none") / "onnx", [1], 199).strip() == golden.strip()


def test_quantized_matrices_are_read(built: Built) -> None:
    expected = reference("classics-7M", "q4")
    ids = expected.tokenizer.encode("It was the best of", add_special_tokens=False)
    text = said(built("classics-7M", "q4") / "onnx", ids, 40)
    assert text.strip() == expected.continuation(ids, 40).strip()
