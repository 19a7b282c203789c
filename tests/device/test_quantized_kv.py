"""A KV cache of 8 or 4 bits on cpu, webgpu and vulkan: its accuracy and its memory; prefixes, forks and
snapshots work as over floats.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

pytest.importorskip("tvm")

from nearfar.build.options import BuildOptions
from nearfar.build.pipeline import build
from nearfar.cli import typer_app
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import BuildError, RequestError, SnapshotError
from nearfar.format.kv import BITS, OF_BITS, rounding, row_words
from nearfar.kernels.buckets import Buckets
from tests.shared_data import shared_data
from tests.support import quantized_kv
from tests.support.backends import cached_pages, executor, forget, greedy, kv_dtype, last_logits, require
from tests.support.browser import browser, new_page, serve
from tests.support.turns import opposed, paired
from tests.support.wasm_executor import open_wasm, require_node

BOUND = {8: 0.002, 4: 0.02}
"""The most by which the perplexity may exceed that over a float16 cache."""
TOLERANCE = {8: 0.01, 4: 0.1}
"""Tolerance of logits, which reach about 20: sums without fused products may round to the
neighbouring code.
"""
HALVES = 0.1
"""Tolerance of programs that keep activations in float16: their rounding changes a code more often."""
ROWS, WINDOW = 16, 512
WINDOWS = {"cpu": 4}
"""Windows of held-out text; one on other devices: a software GPU is slow."""
PROMPT = "It was in the evening of the same day that we came to the house"


TARGETS = ("cpu", "webgpu", "vulkan")
SHORT = (8, 4)
ON_GPUS = opposed(TARGETS[1:], SHORT, ("f32", "f16"))
"""Target, bits and precision. A software GPU takes 10 CPU seconds for a program, so a run tests 8 bits on one
target and 4 bits on the other. test_quantized_kv_gpu.py tests kernels of both.
"""
IN_WASM = [bits for _, bits in paired(("wasm",), SHORT)]
"""Bits that are tested in WebAssembly: compiling and linking a program takes 5 CPU seconds, and calibrating
keys of 4 bits takes as long.
"""
PLACES = [*(("cpu", bits) for bits in SHORT), *dict.fromkeys((target, bits) for target, bits, _ in ON_GPUS)]
"""Pairs of target and bits."""


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts by target. test_quantized_kv_gpu.py has the kernels of other device classes."""
    options = BuildOptions(
        str(shared_data("models", "classics-1M")), tmp_path_factory.mktemp("kv"), TARGETS, "q8",
        cpu_features=("native",), buckets=Buckets((1, ROWS), (1, 4)), kv_bits=(16, 8, 4),
        device_classes=("software",),
    )  # fmt: skip
    build(options)
    return options.out


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    made: tuple[str, int] = request.param
    require(made[0])
    return made


@pytest.fixture(scope="module")
def target(place: tuple[str, int]) -> str:
    return place[0]


@pytest.fixture(scope="module")
def bits(place: tuple[str, int]) -> int:
    return place[1]


@pytest.fixture(scope="module")
def built(everywhere: Path, target: str) -> Path:
    return everywhere / target


@pytest.fixture(scope="module")
def in_wasm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_node()
    options = BuildOptions(
        str(shared_data("models", "classics-1M")), tmp_path_factory.mktemp("kv"), ("wasm",), "q8",
        buckets=Buckets((1, ROWS), (1,)), kv_bits=tuple(IN_WASM),
    )  # fmt: skip
    return build(options)[0]


@pytest.fixture(scope="module")
def engines(built: Path) -> Iterator[dict[int, Engine]]:
    made = {bits: Engine.load(built, kv_bits=bits, kv_memory="4MB") for bits in OF_BITS}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture
def engine(engines: dict[int, Engine], bits: int) -> Engine:
    forget(engines[bits])
    return engines[bits]


def tokens_of(engine: Engine, count: int, skip: int = 0) -> list[int]:
    text = shared_data("text", "heldout.txt").read_text(encoding="utf-8")
    return engine.asynchronous.codec.encode(text[: 8 * (count + skip)])[skip : skip + count]


def perplexity(engine: Engine, tokens: Sequence[int]) -> float:
    """Perplexity over all tokens of each window except its first; all rows of a step are scored."""
    device, table = executor(engine), [b for b in engine.manifest.buffers if b.name == "page_table.0"]
    device.write("page_table.0", np.arange(int(table[0].shape[1]), dtype=np.int32)[None])
    device.write("logit_rows", np.arange(ROWS, dtype=np.int32))
    device.write("slots", np.zeros(256, np.int32))
    total, count = 0.0, 0
    for first in range(0, len(tokens) - 1, ROWS):
        rows = np.array(tokens[first : first + ROWS], np.int32)
        positions = np.full(256, -1, np.int32)
        positions[: len(rows)] = (first + np.arange(len(rows))) % WINDOW
        device.write("tokens", rows)
        device.write("positions", positions)
        device.run("step", ROWS)
        logits = device.fetch("logits", ROWS)()[: len(rows)].astype(np.float64)
        following = tokens[first + 1 : first + 1 + len(rows)]
        for row, token in zip(logits, following, strict=False):
            total += math.log(np.exp(row - row.max()).sum()) + row.max() - row[token]
            count += 1
    return math.exp(total / count)


def test_the_perplexity_stays_within_its_bound(
    engines: dict[int, Engine], engine: Engine, bits: int, target: str
) -> None:
    tokens = tokens_of(engine, WINDOWS.get(target, 1) * WINDOW)
    exact, found = perplexity(engines[16], tokens), perplexity(engine, tokens)
    assert found != exact
    assert abs(found / exact - 1) < BOUND[bits], (found, exact)


def test_keys_with_a_constant_cost_no_more(tmp_path: Path) -> None:
    """Qwen 2.5 has such keys, from its biases: a component of all keys that is far from zero uses up the
    codes of its group. Here it is a component that hardly rotates with the position.
    """
    size, large = 64, 60.0
    source, biased = shared_data("models", "classics-1M"), tmp_path / "biased"
    shutil.copytree(source, biased)
    config = json.loads((source / "config.json").read_text())
    (biased / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    tensors = load_file(source / "model.safetensors")
    kind = next(iter(tensors.values())).dtype
    for layer in range(config["num_hidden_layers"]):
        for name, width in (("q", 2 * size), ("k", size), ("v", size), ("o", 2 * size)):
            bias = np.zeros(width, kind)
            bias[size // 2 - 1 :: size] = large * (name == "k")
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    save_file(tensors, biased / "model.safetensors")
    options = BuildOptions(
        str(biased), tmp_path, ("cpu",), "q8", cpu_features=("native",), buckets=Buckets((1, ROWS), (1,)),
        kv_bits=(16, 4),
    )  # fmt: skip
    (made,) = build(options)
    found = {}
    for bits in (16, 4):
        with Engine.load(made, kv_bits=bits, kv_memory="4MB", verify=False) as engine:
            found[bits] = perplexity(engine, tokens_of(engine, 2 * WINDOW))
    assert abs(found[4] / found[16] - 1) < BOUND[4], found


def test_keys_of_other_artifacts_are_not_mixed(
    engine: Engine, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset that is subtracted from 4-bit keys depends on the calibration text of the build."""
    engine.save_cache(tmp_path / "a.snap", tokens=tokens_of(engine, 64))
    core = engine.asynchronous.core
    other = {**core.manifest.provenance, "keys": "5,000 tokens of other.txt (sha256 0123456789abcdef)"}
    monkeypatch.setattr(core, "manifest", replace(core.manifest, provenance=other))
    if bits == 8:
        engine.load_cache(tmp_path / "a.snap")
        return
    with pytest.raises(SnapshotError, match=r"on 4,096 tokens of the shipped text.*on 5,000 tokens of"):
        engine.load_cache(tmp_path / "a.snap")


def test_keys_are_calibrated_with_the_text_that_is_given(everywhere: Path, tmp_path: Path) -> None:
    """This holds for every quality; where no keys are rounded, nothing is calibrated."""
    text = shared_data("text", "heldout.txt")
    options = BuildOptions(
        str(shared_data("models", "classics-1M")), tmp_path, ("cpu",), "q8", cpu_features=("native",),
        buckets=Buckets((1,), (1,)), kv_bits=(4,), calibrate=text,
    )  # fmt: skip
    made, other = (Artifact.open(path) for path in (build(options)[0], everywhere / "cpu"))
    assert "heldout.txt" in made.manifest.provenance["keys"]
    assert "the shipped text" in other.manifest.provenance["keys"]
    assert (made.read_tensor(rounding(0)) != other.read_tensor(rounding(0))).any()
    with pytest.raises(BuildError, match=r"for --quality good or best, or for a cache of 4 bits"):
        build(replace(options, kv_bits=(8,)))


def test_pages_hold_the_codes_of_what_a_cache_of_floats_holds(
    built: Path, engines: dict[int, Engine], engine: Engine, bits: int
) -> None:
    """Compares the first layer, whose keys and values do not depend on the cache."""
    tokens, name = tokens_of(engine, 64), OF_BITS[bits]
    pages: dict[int, dict[str, Any]] = {}
    for each in (16, bits):
        forget(engines[each])
        greedy(engines[each], tokens, 1)
        pages[each] = executor(engines[each]).read_pages(0, cached_pages(engines[each], tokens[:64]))
    center, weights = Artifact.open(built).read_tensor(rounding(0)).reshape(2, 1, -1, 1, 64)
    for part in ("kv.0.k", "kv.0.v"):
        told = {of: pages[bits][f"{part}.{of}"] for of in ("codes", "scales", "biases")}
        true, moved = pages[16][part].astype(np.float32), 0.0
        if bits == 4 and part == "kv.0.k":
            true, moved = true - center, 0.5 * float(np.abs(weights).reshape(2, 32).sum(-1).max())
        step = np.repeat(told["scales"], true.shape[-1] // told["scales"].shape[-1], axis=-1)
        apart = np.abs(quantized_kv.rows(told, name) - true)
        # Half a quantization step, plus what may move the offset, plus float16's rounding of the value and
        # the offset.
        assert (apart <= (0.51 + moved) * step + 2e-3 * np.abs(true).max()).all()
        assert len(np.unique(told["codes"])) > 100


@pytest.mark.parametrize(("gpu", "bits", "precision"), ON_GPUS)
def test_logits_are_those_of_the_cpu(everywhere: Path, gpu: str, bits: int, precision: str) -> None:
    """The cache equals the cpu's up to rounding: a code may be off by one where sums differ, and a whole
    group where its scale differs.
    """
    require(gpu)
    options: dict[str, Any] = {"kv_bits": bits, "kv_memory": "4MB", "verify": False}
    with (
        Engine.load(everywhere / gpu, precision=precision, **options) as here,
        Engine.load(everywhere / "cpu", **options) as cpu,
    ):
        assert kv_dtype(here) == OF_BITS[bits]
        tokens = tokens_of(here, 100)
        apart = np.abs(last_logits(here, tokens) - last_logits(cpu, tokens)).max()
        assert apart < (TOLERANCE[bits] if precision == "f32" else HALVES)
        pages = [executor(each).read_pages(0, cached_pages(each, tokens[:64])) for each in (here, cpu)]
    assert pages[0].keys() == pages[1].keys()
    for name in ("kv.0.k.codes", "kv.0.v.codes"):
        mine, cpus = (each[name].view(np.uint8) for each in pages)
        assert (mine != cpus).mean() < (0.02 if precision == "f32" else 0.2)


@pytest.mark.parametrize(("gpu", "bits"), [place for place in PLACES if place[0] != "cpu"])
def test_a_snapshot_of_the_cpu_goes_on_here(everywhere: Path, gpu: str, bits: int, tmp_path: Path) -> None:
    require(gpu)
    options: dict[str, Any] = {"kv_bits": bits, "kv_memory": "4MB", "verify": False}
    with (
        Engine.load(everywhere / "cpu", **options) as cpu,
        Engine.load(everywhere / gpu, precision="f32", **options) as here,
    ):
        tokens = tokens_of(cpu, 100)
        wanted = last_logits(cpu, tokens)
        cpu.save_cache(tmp_path / "a.snap", tokens=tokens)
        here.load_cache(tmp_path / "a.snap")
        made = here.completions.create(tokens, max_tokens=1)
        assert made.usage.prompt_tokens_details.cached_tokens == 96
        assert np.abs(last_logits(here, tokens) - wanted).max() < TOLERANCE[bits]


@pytest.mark.parametrize("bits", IN_WASM)
def test_the_same_kernels_in_webassembly(everywhere: Path, bits: int, in_wasm: Path) -> None:
    """WebAssembly has no float16: scales are read and written bit by bit."""
    with (
        Engine.load(everywhere / "cpu", kv_bits=bits, kv_memory="4MB", verify=False) as here,
        open_wasm(in_wasm, 2, kv_dtype=OF_BITS[bits], kv_memory="4MB") as other,
    ):
        tokens = tokens_of(here, 100)
        assert np.abs(last_logits(other, tokens) - last_logits(here, tokens)).max() < TOLERANCE[bits]


@pytest.mark.parametrize("bits", [bits for target, bits in PLACES if target == "webgpu"])
def test_a_browser_says_the_same(everywhere: Path, bits: int) -> None:
    """Answers through WebGPU are equal, also if they share a page until they differ."""
    require("webgpu")
    options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0.7, "n": 2, "seed": 3}
    script = """
      const { kvBits, ...options } = argument;
      const own = await createEngine(artifact, { kvBits, kvMemory: 4e6 });
      const made = await own.completions.create(options);
      return [own.model.program, own.model.contextLength, made.choices.map(({ text }) => text)];
    """
    with serve(everywhere / "webgpu") as address, browser() as running:
        page = new_page(running, address).open()
        page.wait("idle")
        name, context, texts = page.run(script, {**options, "kvBits": bits})
    assert name == f"software-f32-kv{bits}"
    with Engine.load(everywhere / "webgpu", program=name, kv_memory="4MB", verify=False) as engine:
        assert context == engine.manifest.model.context_length
        assert texts == [choice.text for choice in engine.completions.create(**options).choices]


def test_a_prefix_that_is_found_gives_the_tokens_of_a_cold_start(engine: Engine) -> None:
    tokens = tokens_of(engine, 330, 100)
    cold = greedy(engine, tokens, 40)
    forget(engine)
    greedy(engine, tokens[:201], 3)
    warm = engine.completions.create(tokens, max_tokens=40, temperature=0, ignore_eos=True)
    assert warm.usage.prompt_tokens_details.cached_tokens == 192
    assert greedy(engine, tokens, 40) == cold
    assert engine.asynchronous.codec.decode(cold) == warm.choices[0].text


def test_several_answers_share_pages_until_they_part(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "max_tokens": 24, "ignore_eos": True}
    prompt = tokens_of(engine, 40)
    made = engine.completions.create(prompt, n=3, seed=7, **options)
    for index, choice in enumerate(made.choices):
        forget(engine)
        alone = engine.completions.create(prompt, seed=7 + index, **options)
        assert alone.choices[0].text == choice.text


def test_a_page_is_copied_whole(engine: Engine) -> None:
    greedy(engine, tokens_of(engine, 64), 1)
    device, (source, target) = executor(engine), cached_pages(engine, tokens_of(engine, 64))[:2]
    device.copy_page(0, source, target)
    content = device.read_pages(0, [source, target])
    assert len(content) == 3 * 2 * 4
    for array in content.values():
        np.testing.assert_array_equal(array[0], array[1])


def test_a_snapshot_comes_back_bit_by_bit_and_into_no_other_cache(
    built: Path, engines: dict[int, Engine], engine: Engine, bits: int, tmp_path: Path
) -> None:
    tokens, path = tokens_of(engine, 330), tmp_path / "a.snap"
    cold = greedy(engine, tokens, 30)
    saved = engine.save_cache(path, tokens=tokens)
    assert (saved.tokens, saved.kv_bits, saved.kv_dtype) == (320, bits, "float16")
    with Engine.load(built, kv_bits=bits, kv_memory="4MB", verify=False) as other:
        greedy(other, list(range(3, 43)), 1)  # another prompt first, so that the prefix lands on other pages
        other.load_cache(path)
        contents = [
            executor(each).read_pages(0, cached_pages(each, tokens[:320])) for each in (engine, other)
        ]
        for name, array in contents[0].items():
            assert array.shape[0] == 20
            np.testing.assert_array_equal(array, contents[1][name])
        made = other.completions.create(tokens, max_tokens=1)
        assert made.usage.prompt_tokens_details.cached_tokens == 320
        assert greedy(other, tokens, 30) == cold
    for another in {16, 8, 4} - {bits}:
        with pytest.raises(SnapshotError, match=rf"holds float16, {bits}-bit keys and values"):
            engines[another].load_cache(path)


def test_pages_that_do_not_fit_are_refused(engine: Engine) -> None:
    device = executor(engine)
    content = device.read_pages(0, [0, 1])
    with pytest.raises(ValueError, match="do not fit"):
        device.write_pages(0, [0], content)
    with pytest.raises(ValueError, match=r"kv\.2\.v\.scales"):
        device.write_pages(0, [0, 1], {n: a for n, a in content.items() if n != "kv.2.v.scales"})


def test_memory_follows(engines: dict[int, Engine], bits: int, built: Path) -> None:
    """Checks that a given memory holds as many more tokens as `inspect` says."""
    report = json.loads(CliRunner().invoke(typer_app, ["inspect", str(built), "--json"]).stdout)
    report = report[0] if isinstance(report, list) else report
    takes = {name: cache["1024"] for name, cache in report["cache"].items()}
    short = next(name for name in takes if name.endswith(f"-kv{bits}"))
    wide = next(name for name in takes if "-kv" not in name)
    assert takes[short] * 64 * 2 == takes[wide] * 4 * row_words(64, OF_BITS[bits])
    pages = {each: engines[each].asynchronous.core.scheduler.table.allocators[0].count for each in (16, bits)}
    assert pages[bits] * takes[short] == pytest.approx(pages[16] * takes[wide], rel=0.02)


def test_without_a_word_the_cache_is_of_floats(built: Path) -> None:
    asked: tuple[dict[str, Any], ...] = ({}, {"kv_bits": 16}, {"kv_bits": 16, "precision": "f32"})
    for options in asked:
        with Engine.load(built, verify=False, kv_memory="1MB", **options) as engine:
            assert kv_dtype(engine) not in BITS
    name = executor_name(built, 4)
    with Engine.load(built, verify=False, kv_memory="1MB", program=name) as engine:
        assert kv_dtype(engine) == "int4"


def executor_name(path: Path, bits: int) -> str:
    """The program of an artifact whose cache has this many bits."""
    with Engine.load(path, verify=False, kv_memory="1MB", kv_bits=bits) as engine:
        return executor(engine).program_name


def test_the_command_line_takes_the_bits(built: Path) -> None:
    def run(*more: str) -> Any:
        command = ["run", str(built), "It was", "--raw", "--max-tokens", "4", "--kv-memory", "1MB", *more]
        return CliRunner().invoke(typer_app, command)

    assert run("--kv-bits", "8").exit_code == 0
    with pytest.raises(RequestError, match=r"no program with a KV cache of 3 bits.*float16.*, int8, int4"):
        Engine.load(built, kv_bits=3)


@pytest.mark.parametrize(
    ("target", "model", "asked", "message"),
    [
        ("onnx", "classics-1M", (16, 8), "target onnx has no programs with a KV cache of 8 bits"),
        ("vulkan", "stories260K", (4,), "heads of 8 values cannot be cut into groups of 32"),
        ("cpu", "stories260K", (8,), "heads of 8 values cannot be cut into groups of 32"),
        ("cpu", "classics-1M", (16, 5), "unknown --kv-bits 5; known: 16, 8, 4"),
        ("cpu", "classics-1M", (), r"unknown --kv-bits \(none\)"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    tmp_path: Path, target: str, model: str, asked: tuple[int, ...], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        build(
            BuildOptions(str(shared_data("models", model)), tmp_path / "out", (target,), "q8", kv_bits=asked)
        )
    assert not (tmp_path / "out" / target).exists()
