"""`nearfar build --quality`: what a model loses by its quantization, on a text that it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality import perplexity, windows, with_weights
from nearfar.build.source import BuildOptions, open_source
from nearfar.build.weights.containers import open_checkpoint
from tests.e2e.test_build import nearfar
from tests.shared_data import shared_data

MODEL = ("models", "classics-1M")


def build(out: Path, *more: object) -> None:
    """For mlx, which compiles nothing."""
    done = nearfar("build", shared_data(*MODEL), "--target", "mlx", *more, "-o", out)
    assert done.returncode == 0, done.stderr


def loss(out: Path) -> float:
    """Perplexity of an artifact's weights."""
    packed = open_source(BuildOptions(str(out / "mlx"), out)).packed
    assert packed is not None
    plain = open_checkpoint(shared_data(*MODEL))
    model = AutoModelForCausalLM.from_pretrained(plain.path, dtype=torch.float32).eval()
    with_weights(model, {name: packed.weights(name, 0, plain.shapes[name][0]) for name in packed.tensors})
    return perplexity(model, windows(plain, shared_data("text", "heldout.txt"), 40))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of one's own, some 12,000 tokens."""
    file = tmp_path_factory.mktemp("text") / "mine.txt"
    book = shared_data("text", "classics", "Kenneth Grahame", "The Wind in the Willows.md")
    file.write_text(book.read_text(encoding="utf-8")[:48_000], encoding="utf-8")
    return file


def test_each_quality_answers_better_than_the_one_below(tmp_path: Path, own: Path) -> None:
    found = {}
    calibrated: dict[str, tuple[object, ...]] = {"fast": (), "good": ("--calibrate", own), "best": ()}
    for quality, text in calibrated.items():
        build(tmp_path / quality, "--quant", "q3", "--quality", quality, *text)
        found[quality] = loss(tmp_path / quality)
    assert found["best"] < found["good"] < found["fast"]
    sizes = {(tmp_path / quality / "mlx" / "model.safetensors").stat().st_size // 1000 for quality in found}
    assert len(sizes) == 1  # of what is paid for it, nothing lies in the artifact
    methods = {
        quality: json.loads((tmp_path / quality / "mlx" / "manifest.json").read_text())["quantization"][
            "method"
        ]
        for quality in found
    }
    assert "GPTQ" in methods["best"]
    assert "65,536 tokens of the shipped text" in methods["best"]
    assert "tokens of mine.txt (sha256 " in methods["good"]
    assert "tokens" not in methods["fast"]


def test_bits_are_where_they_cost_least(tmp_path: Path, own: Path) -> None:
    """At the size of 3 bits in groups of 64, scales included; and below a size in bytes."""
    text = ("--quality", "good", "--calibrate", own)
    build(tmp_path / "even", "--quant", "q3", *text)
    build(tmp_path / "mixed", "--bits", 3.5, *text)
    assert loss(tmp_path / "mixed") < loss(tmp_path / "even")
    manifest = json.loads((tmp_path / "mixed" / "mlx" / "manifest.json").read_text())
    matrices = [m for m in manifest["quantization"]["matrices"] if "reason" not in m]
    taken = sum(m["n"] * m["k"] * (m["bits"] + 32 / m["group_size"]) for m in matrices)
    assert 3.3 < taken / sum(m["n"] * m["k"] for m in matrices) <= 3.5
    assert len({m["bits"] for m in matrices}) > 1
    build(tmp_path / "fit", "--fit", "600kB", *text)
    size = sum(file.stat().st_size for file in (tmp_path / "fit" / "mlx").glob("*.safetensors"))
    assert 570_000 < size < 605_000  # names and shapes come on top


def test_the_same_text_gives_the_same_bytes(tmp_path: Path, own: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, "--quality", "best", "--calibrate", own)
    first, second = (
        sorted(
            (file.name, file.read_bytes()) for file in (tmp_path / name / "mlx").iterdir() if file.is_file()
        )
        for name in "ab"
    )
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quality", "splendid"], "unknown quality 'splendid': use fast, good, best"),
        (["--calibrate", "{text}"], "is a text for --quality good or best"),
        (["--quality", "good", "--calibrate", "{nothing}"], "nothing.txt: cannot be read"),
        (["--quality", "good", "--calibrate", "{text}"], "of this model, at least 4,096 are needed"),
        (["--quality", "good", "--calibrate", "{bytes}"], "is no UTF-8 text (byte 3)"),
        (
            ["--bits", "4.5"],
            "--bits 4.5 needs to measure what each matrix loses: add --quality best, or good",
        ),
        (["--bits", "40", "--quality", "good"], "--bits 40 is none between 2 and 9"),
        (["--bits", "4", "--fit", "1MB", "--quality", "good"], "--bits 4.0 and --fit 1000000 are two sizes"),
        (["--fit", "huge", "--quality", "good"], "--fit must be a size such as 512MB"),
        (
            ["--fit", "100kB", "--quality", "good"],
            "are too little for the matrices: with 2 bits each they have",
        ),
        (["--bits", "4", "--quant", "q4", "--quality", "good"], "--quant q4 says the bits of every matrix"),
        (["--quality", "best", "--quant", "none"], "is about quantized weights, and none are asked for"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A short text. " * 50)
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff" * 100)
    files = {
        "text": tmp_path / "short.txt",
        "bytes": tmp_path / "bytes.txt",
        "nothing": tmp_path / "nothing.txt",
    }
    given = [argument.format(**files) for argument in arguments]
    done = nearfar("build", shared_data(*MODEL), "--target", "mlx", *given, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out" / "mlx").exists()


def test_codes_that_are_kept_are_not_looked_for(tmp_path: Path, own: Path) -> None:
    build(tmp_path / "q4")
    done = nearfar(
        "build", tmp_path / "q4" / "mlx", "--target", "mlx", "--quality", "best", "-o", tmp_path / "x"
    )
    assert done.returncode == 1
    text = " ".join(done.stderr.split())
    assert "are kept: leave it out, or quantize anew with --requantize q4" in text
    more = ("--requantize", "q3", "--quality", "good", "--calibrate", own)
    done = nearfar("build", tmp_path / "q4" / "mlx", "--target", "mlx", *more, "-o", tmp_path / "anew")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "anew" / "mlx" / "manifest.json").read_text())
    assert {m["carried"] for m in manifest["quantization"]["matrices"]} == {"requantized"}
    assert "weighted" in manifest["quantization"]["method"]
