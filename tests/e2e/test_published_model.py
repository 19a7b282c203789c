"""From a published file to an answer, with a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_store import nearfar
from tests.support.published import published_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.mark.parametrize("device", ["cpu", "onnx"])
def test_one_command_from_a_gguf_file_to_a_right_answer(home: Path, device: str) -> None:
    question = ("What is the capital of France?", "--temperature", "0", "--max-tokens", "40")
    code, answer, err = nearfar(home, "run", published_model(), *question, "--device", device)
    assert (code, answer.strip()) == (0, "The capital of France is Paris."), err


def test_its_codes_are_carried_exactly_and_its_answers_are_drawn_with_care(home: Path) -> None:
    file = published_model()
    code, _, err = nearfar(home, "pull", file)
    assert code == 0, err
    code, shown, err = nearfar(home, "show", file, "--json")
    assert code == 0, err
    card = json.loads(shown)
    assert (card["context"], card["license"], card["quantization"]) == (8192, "apache-2.0", "q4")
    assert card["ends_with"] == ["2 <|im_end|>", "0 <|endoftext|>"]
    assert card["sampling"]["temperature"] == 0.8  # the file itself names no temperature
    manifest = json.loads((Path(card["path"]) / "cpu" / "manifest.json").read_text(encoding="utf-8"))
    assert {matrix["carried"] for matrix in manifest["quantization"]["matrices"]} == {"exact"}
    # a sampled answer stays on the subject to its end; at temperature 1 over the whole vocabulary it did not
    code, drawn, err = nearfar(
        home, "run", file, "What is the capital of France?", "--seed", "7", "--device", "cpu"
    )
    assert code == 0, err
    assert "Paris" in drawn
