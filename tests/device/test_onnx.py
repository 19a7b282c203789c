"""The onnx target's output, read by ONNX Runtime alone: weights, batches, parts, rejections."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import BuildError
from nearfar.kernels.codes import unpack_codes
from nearfar.kernels.quantized import Matrix, QuantTensor
from tests.shared_data import shared_data
from tests.support.architectures import CASES, checkpoint, prompt, reference
from tests.support.artifacts import Built
from tests.support.cases import Case

onnx = pytest.importorskip("onnx", reason="needs onnx (pip install 'nearfar[onnx]')")
ort = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime (pip install 'nearfar[onnx]')")

from nearfar.targets.onnx import external  # noqa: E402
from nearfar.targets.onnx.external import ExternalWriter  # noqa: E402
from nearfar.targets.onnx.graph import Graph as Builder  # noqa: E402
from nearfar.targets.onnx.matrices import MatrixNodes, integer_zeros, write_matrix  # noqa: E402

Array = npt.NDArray[Any]
PLAIN = next(case for case in CASES if str(case) == "llama-plain")


class Graph:
    """The graph of an artifact in a session, as an app would run it."""

    def __init__(self, root: Path) -> None:
        self.manifest = Artifact.open(root).manifest
        assert self.manifest.function is not None
        self.file = root / self.manifest.function.file
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(self.file), options, providers=["CPUExecutionProvider"])

    def empty(self, batch: int) -> dict[str, Array]:
        return {
            f"past_key_values.{c}.{part}": np.zeros((batch, cache.kv_heads, 0, cache.head_dim), np.float32)
            for c, cache in enumerate(self.manifest.caches)
            for part in ("key", "value")
        }

    def run(self, tokens: Array, mask: Array, past: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        given = {"input_ids": tokens.astype(np.int64), "attention_mask": mask.astype(np.int64), **past}
        logits, *present = self.session.run(None, given)
        return logits, dict(zip(past, present, strict=True))


def test_onnx_runtime_alone_tells_the_golden_story(built: Built) -> None:
    root = built("stories260K", "none") / "onnx"
    graph = Graph(root)
    onnx.checker.check_model(str(graph.file))
    tokens, past, fed = [1], graph.empty(1), [1]
    for _ in range(199):
        logits, past = graph.run(np.array([fed]), np.ones((1, len(tokens))), past)
        fed = [int(logits[0, -1].argmax())]
        tokens += fed
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(root / "tokenizer.json")).decode(tokens)
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    assert text.strip() == golden.strip()


def test_the_command_line_builds_inspects_and_runs_it(built: Built) -> None:
    root = built("stories260K", "none") / "onnx"

    def nearfar(*args: object) -> bytes:
        command = [sys.executable, "-m", "nearfar", *map(str, args)]
        return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout

    told = nearfar("run", root, "", "--raw", "--max-tokens", 199, "--temperature", 0)
    assert told == shared_data("models", "stories260K", "golden_greedy.txt").read_bytes()
    report = json.loads(nearfar("inspect", root, "--json"))
    assert report["target"] == "onnx"
    assert report["programs"][0]["weight_bytes_per_token"] > 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = build(BuildOptions(str(checkpoint(PLAIN)), tmp_path_factory.mktemp("plain"), ("onnx",), "none"))
    return path


def test_sequences_of_different_lengths_go_on_together(plain: Path) -> None:
    graph, lengths = Graph(plain), (9, 14)
    texts = [prompt(PLAIN, length) for length in lengths]
    pasts = [
        graph.run(np.array([text[:-1]]), np.ones((1, len(text) - 1)), graph.empty(1))[1] for text in texts
    ]
    room = max(lengths) - 1
    past = {
        name: np.concatenate(
            [np.pad(p[name], [(0, 0), (0, 0), (0, room - p[name].shape[2]), (0, 0)]) for p in pasts]
        )
        for name in pasts[0]
    }
    mask = np.arange(room + 1) < np.array(lengths)[:, None]
    logits, _ = graph.run(np.array([[text[-1]] for text in texts]), mask, past)
    for row, text in zip(logits, texts, strict=True):
        np.testing.assert_allclose(row[0], reference(PLAIN)(text)[-1], atol=2e-3, rtol=1e-3)


def test_logits_are_computed_of_the_tokens_asked_for(plain: Path) -> None:
    graph, tokens = Graph(plain), np.array([prompt(PLAIN, 9)])
    given = {"input_ids": tokens, "attention_mask": np.ones((1, 9), np.int64), **graph.empty(1)}
    every = graph.session.run(["logits"], given)[0]
    last = graph.session.run(["logits"], {**given, "num_logits_to_keep": np.array(2, np.int64)})[0]
    assert every.shape[1] == 9
    np.testing.assert_allclose(last, every[:, -2:], atol=1e-5)


@pytest.mark.parametrize("kind", ["biases", "zeros", "float16", "float32"])
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 16), (4, 128), (5, 32), (6, 32), (8, 64)])
def test_products_and_rows_are_those_of_the_weights(kind: str, bits: int, group: int, tmp_path: Path) -> None:
    """Integers keep their scales and offsets; widths without an operator are widened."""
    rng, n, k = np.random.default_rng(bits), 37, 256
    scales = (rng.integers(1, 8, (n, k // group)) / 256).astype(np.float16)
    zeros = rng.integers(0, 1 << bits, scales.shape)
    biases = -scales * zeros if kind == "zeros" else rng.normal(0, 0.3, scales.shape)
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    stored: Any = QuantTensor.of_codes(codes, scales, biases.astype(np.float16), bits)
    affine = [np.repeat(part.astype(np.float64), group, axis=1) for part in (scales, stored.biases)]
    weights, matrix = codes * affine[0] + affine[1], Matrix(n, k, bits, group)
    if kind.startswith("float"):
        matrix = Matrix(n, k, int(kind[5:]))
        stored = weights.astype(kind)
        weights = stored.astype(np.float64)
    with ExternalWriter(tmp_path, "model.onnx_data", external.PART_BYTES) as files:
        placed = {"w": write_matrix(files, "w", matrix, stored, int8=False)}
        files.finish()
    parts = {part.partition(".")[0] for part in placed["w"]}
    assert {"biases", "zeros"} & parts == ({kind} if matrix.quantized else set())
    graph = Builder("products")
    made = MatrixNodes(graph, {"w": matrix}, placed, int8=False)
    graph.output(made.product(graph.input("x", "float32", ["b", "l", k]), "w"), "y", ["b", "l", n])
    graph.output(made.rows(graph.input("ids", "int64", ["b", "l"]), "w"), "rows", ["b", "l", k])
    graph.save(tmp_path / "model.onnx")
    nodes = onnx.load(str(tmp_path / "model.onnx"), load_external_data=False).graph.node
    widths = [a.i for node in nodes for a in node.attribute if a.name == "bits"]
    assert max(widths, default=0) <= 4, "8 bits in float take 50 times as long"
    session = ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x, ids = rng.normal(size=(1, 3, k)).astype(np.float32), np.array([[0, n - 1, 5]])
    y, rows = session.run(None, {"x": x, "ids": ids})
    expected = x @ weights.T
    assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(rows, weights[ids], atol=1e-5)


def test_products_of_int8_round_the_rows_when_asked_for(tmp_path: Path) -> None:
    options = BuildOptions(str(checkpoint(PLAIN)), tmp_path, ("onnx",), "q4", 32, products=("int8",))
    (path,) = build(options)
    model = onnx.load(str(Graph(path).file), load_external_data=False)
    levels = [
        next((a.i for a in node.attribute if a.name == "accuracy_level"), 0)
        for node in model.graph.node
        if node.op_type == "MatMulNBits"
    ]
    assert levels
    assert set(levels) == {4}


def test_offsets_that_are_integers_become_zero_points() -> None:
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.001, 0.01, (6, 2)).astype(np.float16)
    # zeros are powers of two, so that a product with a float16 scale is exact
    zeros = rng.integers(0, 8, (6, 2))
    zeros[...] = 2 ** (zeros % 4)
    codes = rng.integers(0, 16, (6, 64)).astype(np.uint8)
    exact = QuantTensor.of_codes(codes, scales, (-scales * zeros.astype(np.float16)).astype(np.float16), 4)
    np.testing.assert_array_equal(integer_zeros(exact), zeros)
    moved = replace(exact, biases=np.nextafter(exact.biases, np.float16(0)))
    assert integer_zeros(moved) is None
    assert integer_zeros(replace(exact, biases=-exact.biases)) is None, "below 0"
    np.testing.assert_array_equal(unpack_codes(exact.words, 4), codes)


def test_weights_lie_in_parts_of_bounded_size(tmp_path: Path) -> None:
    arrays = [np.full((100, 100), i, np.float32) for i in range(5)]
    with ExternalWriter(tmp_path, "onnx/model.onnx_data", part_bytes=100_000) as files:
        placed = [files.add(f"t{i}", array) for i, array in enumerate(arrays)]
        listed = files.finish()
        with pytest.raises(BuildError, match="quantize it"):
            files.add("large", np.zeros(200_000, np.uint8))
    assert [file.file for file in listed] == [f"onnx/model.onnx_data{end}" for end in ("", "_1", "_2")]
    assert all(file.bytes <= 100_000 for file in listed)
    for place, array in zip(placed, arrays, strict=True):
        data = (tmp_path / "onnx" / place.file).read_bytes()[place.offset : place.offset + place.bytes]
        np.testing.assert_array_equal(np.frombuffer(data, np.float32), array.ravel())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_no_weights_is_told(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may show only when fsync writes the bytes out."""

    def fails(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with ExternalWriter(tmp_path, "model.onnx_data", part_bytes=100_000) as files:
        files.add("t", np.zeros(10, np.float32))
        with pytest.raises(BuildError, match=r"the disk of .* is full|cannot write model\.onnx_data under"):
            files.finish()


def test_a_graph_whose_weights_lie_in_several_parts_gives_the_same_logits(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = (plain / "onnx").glob("*.onnx_data*")
    limit = one.stat().st_size // 3
    monkeypatch.setattr(external, "PART_BYTES", limit)
    (root,) = build(BuildOptions(str(checkpoint(PLAIN)), tmp_path, ("onnx",), "none"))
    parts = list((root / "onnx").glob("*.onnx_data*"))
    assert len(parts) >= 3
    assert all(part.stat().st_size <= limit for part in parts)
    loaded = json.loads((root / "config.json").read_text())["transformers.js_config"]
    assert loaded["use_external_data_format"] == {"model.onnx": len(parts)}
    graphs = Graph(plain), Graph(root)
    onnx.checker.check_model(str(graphs[1].file))
    tokens = np.array([prompt(PLAIN, 9)])
    first, second = (graph.run(tokens, np.ones((1, 9)), graph.empty(1))[0] for graph in graphs)
    np.testing.assert_array_equal(first, second)


def test_the_files_beside_the_graph_describe_it(plain: Path) -> None:
    graph = Graph(plain)
    config, genai = (json.loads((plain / name).read_text()) for name in ("config.json", "genai_config.json"))
    loaded = config["transformers.js_config"]
    assert (loaded["dtype"], loaded["use_external_data_format"]) == ("fp32", {"model.onnx": 1})
    decoder = genai["model"]["decoder"]
    assert (plain / decoder["filename"]) == graph.file
    named = {decoder["inputs"]["input_ids"], decoder["inputs"]["attention_mask"]}
    named |= {
        decoder["inputs"][f"past_{part}_names"] % layer
        for part in ("key", "value")
        for layer in range(decoder["num_hidden_layers"])
    }
    assert named == {given.name for given in graph.session.get_inputs()}
    shape = next(i.shape for i in graph.session.get_inputs() if i.name == "past_key_values.0.key")
    assert shape == [
        "batch_size",
        decoder["num_key_value_heads"],
        "past_sequence_length",
        decoder["head_size"],
    ]


def test_embeddings_are_refused_by_name(tmp_path: Path) -> None:
    case: Case = PLAIN
    with pytest.raises(BuildError, match="target onnx is for models that give logits"):
        build(BuildOptions(str(checkpoint(case)), tmp_path, ("onnx",), "none", embeddings=True))
