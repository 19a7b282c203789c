"""`nearfar build --quality`: the loss by quantization on text that the calibration never saw."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.opening import open_checkpoint
from nearfar.cli.inspect import read_tensors
from tests.shared_data import shared_data
from tests.support.commands import nearfar
from tests.support.late import late

torch, transformers = late("torch"), late("transformers")
quality = late("benchmarks.quality", "torch", "transformers")

MODEL = ("models", "classics-1M")


def build(out: Path, *more: object) -> None:
    """Build for mlx, which compiles nothing."""
    done = nearfar("build", shared_data(*MODEL), "--target", "mlx", *more, "-o", out)
    assert done.returncode == 0, done.stderr


@cache
def loss(out: Path) -> float:
    """Perplexity of an artifact's weights."""
    quantized = open_source(BuildOptions(str(out / "mlx"), out)).quantized
    assert quantized is not None
    plain = open_checkpoint(shared_data(*MODEL))
    model = transformers.AutoModelForCausalLM.from_pretrained(plain.path, dtype=torch.float32).eval()
    quality.with_weights(
        model, {name: quantized.weights(name, 0, plain.shapes[name][0]) for name in quantized.tensors}
    )
    return quality.perplexity(model, quality.windows(plain.path, shared_data("text", "heldout.txt"), 20))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text of the user, of about 6,000 tokens."""
    file = tmp_path_factory.mktemp("text") / "mine.txt"
    book = shared_data("text", "classics", "Kenneth Grahame", "The Wind in the Willows.md")
    file.write_text(book.read_text(encoding="utf-8")[:24_000], encoding="utf-8")
    return file


class Makes:
    """Artifacts by their options, each built once."""

    def __init__(self, root: Path, text: Path) -> None:
        self._root, self._text = root, text
        self._made: dict[tuple[object, ...], Path] = {}

    def __call__(self, *asked: object) -> Path:
        if asked not in self._made:
            out = self._root / str(len(self._made))
            given = ("--calibrate", self._text) if "--quality" in asked and "shipped" not in asked else ()
            build(out, *(word for word in asked if word != "shipped"), *given)
            self._made[asked] = out
        return self._made[asked]


@pytest.fixture(scope="module")
def makes(tmp_path_factory: pytest.TempPathFactory, own: Path) -> Makes:
    """Artifacts calibrated with the user's text, unless "shipped" is among the options."""
    return Makes(tmp_path_factory.mktemp("made"), own)


def quantization(out: Path) -> Any:
    return json.loads((out / "mlx" / "manifest.json").read_text())["quantization"]


FAST, GOOD = ("--quant", "q3"), ("--quant", "q3", "--quality", "good")
BEST = ("--quant", "q3", "--quality", "best")


def test_each_quality_answers_better_than_the_one_below(makes: Makes) -> None:
    found = [makes(*asked) for asked in (FAST, GOOD, BEST)]
    fast, good, best = map(loss, found)
    assert best < good < fast
    sizes = {(out / "mlx" / "model.safetensors").stat().st_size // 1000 for out in found}
    assert len(sizes) == 1  # the artifact has no trace of what the quality cost
    methods = [quantization(out)["method"] for out in found]
    assert "tokens" not in methods[0]
    assert "tokens of mine.txt (sha256 " in methods[1]
    assert "GPTQ" in methods[2]


def test_a_text_comes_with_it(makes: Makes) -> None:
    out = makes(*GOOD, "shipped")
    assert "; 8,192 tokens of the shipped text" in quantization(out)["method"]
    assert loss(out) < loss(makes(*FAST))


@pytest.mark.parametrize(
    ("asked", "said"), [(("--quant", "q4"), True), (("--quant", "q8"), False), (GOOD, False)]
)
def test_few_bits_say_what_would_be_better(tmp_path: Path, asked: tuple[str, ...], said: bool) -> None:
    model = shared_data("models", "stories260K")
    done = nearfar("build", model, "--target", "mlx", *asked, "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("better answers at the same size, build with --quality good" in done.stderr) == said


def test_bits_are_where_they_cost_least(makes: Makes) -> None:
    """Tests the size of 3 bits in groups of 64, scales included, and a limit in bytes."""
    mixed = makes("--bits", 3.5, "--quality", "good")
    assert loss(mixed) < loss(makes(*GOOD))
    matrices = [m for m in quantization(mixed)["matrices"] if "reason" not in m]
    taken = sum(m["n"] * m["k"] * (m["bits"] + 32 / m["group_size"]) for m in matrices)
    assert 3.3 < taken / sum(m["n"] * m["k"] for m in matrices) <= 3.5
    assert len({m["bits"] for m in matrices}) > 1
    files = (makes("--fit", "600kB", "--quality", "good") / "mlx").glob("*.safetensors")
    assert 570_000 < sum(size for file in files for _, _, size in read_tensors(file)) <= 600_000


def test_the_same_text_gives_the_same_bytes(tmp_path: Path, makes: Makes, own: Path) -> None:
    build(tmp_path, *BEST, "--calibrate", own)
    first, second = (
        sorted((file.name, file.read_bytes()) for file in (root / "mlx").iterdir() if file.is_file())
        for root in (tmp_path, makes(*BEST))
    )
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quality", "splendid"], "unknown quality 'splendid': use fast, good, best"),
        (["--calibrate", "{text}"], "is a text for --quality good or best"),
        (["--quality", "good", "--calibrate", "{nothing}"], "nothing.txt: cannot be read"),
        (["--quality", "good", "--calibrate", "{text}"], "of this model, at least 4,096 are needed"),
        (["--quality", "good", "--calibrate", "{bytes}"], "is not UTF-8 (byte 3)"),
        (
            ["--bits", "4.5"],
            "--bits 4.5 needs to measure what each matrix loses: add --quality best, or good",
        ),
        (["--bits", "40", "--quality", "good"], "--bits must be between 2 and 9, not 40"),
        (["--bits", "4", "--fit", "1MB", "--quality", "good"], "--bits 4 and --fit 1.0 MB are two sizes"),
        (["--fit", "huge", "--quality", "good"], "--fit must be a size such as 512MB"),
        (
            ["--fit", "100kB", "--quality", "good"],
            "is too small: with 2 bits in each matrix the weights have",
        ),
        (["--bits", "4", "--quant", "q4", "--quality", "good"], "--quant q4 says the bits of every matrix"),
        (
            ["--fit", "1MB", "--quant", "none", "--quality", "good"],
            "--quant none says the bits of every matrix",
        ),
        (
            ["--quality", "best", "--quant", "none"],
            "is for quantized weights, and these are not to be quantized",
        ),
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


def test_codes_that_are_kept_are_not_looked_for(tmp_path: Path, makes: Makes, own: Path) -> None:
    kept = makes(*FAST) / "mlx"
    done = nearfar("build", kept, "--target", "mlx", "--quality", "best", "-o", tmp_path / "x")
    assert done.returncode == 1
    text = " ".join(done.stderr.split())
    assert "are kept: leave --quality out, or quantize them again with --requantize q3" in text
    done = nearfar("build", kept, "--target", "mlx", "--fit", "1MB", "-o", tmp_path / "x")
    assert "leave --fit out, or quantize them again with --requantize q3 --quality best" in " ".join(
        done.stderr.split()
    )
    more = ("--requantize", "q2", "--quality", "good", "--calibrate", own)
    done = nearfar("build", kept, "--target", "mlx", *more, "-o", tmp_path / "anew")
    assert done.returncode == 0, done.stderr
    found = quantization(tmp_path / "anew")
    assert {m["carried"] for m in found["matrices"]} == {"requantized"}
    assert "weighted" in found["method"]


def test_a_row_of_the_benchmark_tells_perplexity_and_how_far_it_is_from_the_float_model() -> None:
    """Two tokens to predict, of a vocabulary of two."""
    window = torch.tensor([[0, 1, 0]])
    found = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    expected = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    perplexity, apart = quality.scores([found], [window], [expected])
    assert perplexity == pytest.approx((0.5 * 0.75) ** -0.5)
    assert apart == pytest.approx(0.5 * (0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)))
    assert quality.scores([found], [window], None) == (pytest.approx(perplexity), None)
