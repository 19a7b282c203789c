"""A tokenizer gives exactly the tokens of a text, whichever program saved its file."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from nearfar.build.calibration.text import read_text
from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.tokenizer import tokenizer_of
from tests.support import speaking, tiny
from tests.support.commands import nearfar

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "build", "edge_runtime", "fallback_server", "format", "remote", "routing", "src/nearfar", "step",
    "targets",
)  # fmt: skip
HOME = "edge_runtime/text/tokenizer.py"
CUT = {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}}
FILLED = {
    "padding": {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "!"},
}  # fmt: skip
SAVED = pytest.mark.parametrize("said", [CUT, FILLED, CUT | FILLED], ids=["truncation", "padding", "both"])


def test_one_place_makes_tokenizers_of_files() -> None:
    files = (file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py"))
    texts = {file: text for file in files if "Tokenizer.from_" in (text := file.read_text(encoding="utf-8"))}
    found = {
        str(file.relative_to(ROOT))
        for file, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and "Tokenizer.from_" in ast.unparse(node)
    }
    assert found == {HOME}


@SAVED
def test_settings_of_calls_are_not_obeyed(said: dict[str, Any], tmp_path: Path) -> None:
    data = json.dumps(json.loads(tiny.tokenizer().to_str()) | said)
    text = "twelve bytes"
    for given in (data, data.encode()):
        assert tokenizer_of(given).encode(text).ids == list(tiny.tokenizer().encode(text).ids)
    speaking.make(tmp_path, tokenizer=said)  # as `nearfar serve` opens a checkpoint
    assert len(TextCodec.open_directory(tmp_path, None).encode(text)) == len(text)


@SAVED
def test_a_built_prompt_is_neither_cut_nor_filled(said: dict[str, Any], tmp_path: Path) -> None:
    source, out = speaking.make(tmp_path / "m", tokenizer=said), tmp_path / "out"
    done = nearfar("build", source, "--target", "mlx", "--quant", "none", "-o", out)
    assert done.returncode == 0, done.stderr
    asked = "a question of 25 characters"
    done = nearfar("run", out, asked, "--json", "--temperature", 0, "--max-tokens", 8)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["prompt_tokens"] == len(asked) + 4  # BOS, two turns, END
    assert answer["choices"][0]["message"]["content"] == "Hi!"
    (copy,) = out.rglob("tokenizer.json")  # the copy that a browser, mlx-lm and ONNX Runtime read
    assert json.loads(copy.read_text()) == json.loads(tiny.tokenizer().to_str())


def test_a_calibration_reads_all_of_its_text(tmp_path: Path) -> None:
    source = speaking.make(tmp_path, tokenizer=CUT)
    opened = open_source(BuildOptions(str(source), tmp_path / "out"))
    assert read_text(None, opened.checkpoint, opened.model).windows.size > 4096
