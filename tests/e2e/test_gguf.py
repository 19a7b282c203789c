"""`nearfar build model.gguf` as a user runs it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest import mock

import gguf

from nearfar.build.options import BuildOptions
from tests.shared_data import shared_data
from tests.support import gguf_files
from tests.support.artifacts import FEW
from tests.support.commands import nearfar


def test_a_real_model_comes_back_from_a_gguf_file(tmp_path: Path) -> None:
    source = shared_data("models", "stories260K")
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        gguf_files.sentencepiece(writer, data)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    file = gguf_files.write(source, tmp_path / "stories.gguf", vocabulary=vocabulary)
    built = nearfar(
        "build",
        file,
        "--target",
        "cpu",
        "--quant",
        "none",
        "--cpu-features",
        "native",
        "-o",
        tmp_path / "out",
    )
    assert built.returncode == 0, built.stderr
    done = nearfar("run", tmp_path / "out" / "cpu", "", "--raw", "--max-tokens", 199, "--temperature", 0)
    assert done.stdout.encode() == (source / "golden_greedy.txt").read_bytes()


def test_codes_of_a_gguf_file_are_in_inspect(tmp_path: Path) -> None:
    source = shared_data("models", "classics-1M")
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        gguf_files.byte_level(writer, data, "gpt-2")

    def store(name: str, value: gguf_files.Array) -> tuple[gguf_files.Array, str]:
        return gguf.quants.quantize(value.astype("float32"), gguf_files.KINDS.Q8_0), "Q8_0"

    file = gguf_files.write(source, tmp_path / "classics.gguf", store, vocabulary=vocabulary)
    with mock.patch("nearfar.cli.build.BuildOptions", partial(BuildOptions, buckets=FEW)):
        built = nearfar("build", file, "--target", "cpu", "--cpu-features", "native", "-o", tmp_path / "out")
    assert built.returncode == 0, built.stderr
    assert "exact: 17 matrices" in built.stderr
    shown = nearfar("inspect", tmp_path / "out" / "cpu")
    assert "exact" in shown.stdout
