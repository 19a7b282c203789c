"""Whole programs that multiply prompts as bytes: near the float programs, and equal on every device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.kernels.buckets import Buckets
from tests.support.backends import executor, greedy, last_logits, require
from tests.support.browser import browser, new_page, serve
from tests.support.paths import ROOT
from tests.support.turns import paired

PROMPT = "The old king looked at the sea and said that he would never again go out to the islands in winter"
COUNT = 4
TARGETS = ("vulkan", "webgpu")
PLACES = [("f32", TARGETS), *(("f16", (target,)) for _, target in paired(("f16",), TARGETS))]
"""Only in float32 do targets agree to the bit, so a run tests a float16 program on one target."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample for one class of devices, with both kinds of products."""
    out = tmp_path_factory.mktemp("int8")
    options = BuildOptions(
        str(ROOT / "examples/sample-model"), out, TARGETS, "q4", buckets=Buckets((1, 64), (1,)),
        device_classes=("mobile",), products=("float", "int8"),
    )  # fmt: skip
    build(options)
    return out


def answer(path: Path, program: str) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of a program, and the logits that followed the prompt."""
    tokens = TextCodec.open(Artifact.open(path)).encode(PROMPT)
    assert len(tokens) > COUNT
    with Engine.load(path, device=path.name, kv_memory="4MB", program=program) as engine:
        logits = last_logits(engine, tokens)
        assert executor(engine).program_name == program
        return greedy(engine, tokens, COUNT), logits


@pytest.mark.parametrize(("precision", "targets"), PLACES)
def test_a_program_of_bytes_is_near_the_float_one_and_the_same_everywhere(
    built: Path, precision: str, targets: tuple[str, ...]
) -> None:
    name = f"mobile-{precision}-int8"
    found = {}
    for target in targets:
        require(target)
        _, plain = answer(built / target, f"mobile-{precision}")
        found[target], rounded = answer(built / target, name)
        off = np.abs(rounded - plain).max() / np.abs(plain).max()
        assert 1e-4 < off < 0.05, target  # the product differs, but the answer does not
        assert rounded.argmax() in np.argsort(plain)[-2:]
        assert len(found[target]) == COUNT
    if precision == "f32":  # float16 is rounded in other places
        assert found["vulkan"] == found["webgpu"]


def test_a_browser_runs_the_same_program(built: Path) -> None:
    require("webgpu")
    script = """
      const own = await createEngine(artifact, { program: "mobile-f32-int8" });
      const { model } = own;
      const made = await own.completions.create({ prompt: argument, max_tokens: 4, temperature: 0 });
      return [model.program, made.choices[0].text];
    """
    with serve(built / "webgpu") as address, browser() as running:
        page = new_page(running, address).open()
        page.wait("idle")
        program, text = page.run(script, PROMPT)
    with Engine.load(built / "webgpu", device="webgpu", kv_memory="4MB", program="mobile-f32-int8") as engine:
        made = engine.completions.create(prompt=PROMPT, max_tokens=COUNT, temperature=0)
    assert (program, text) == ("mobile-f32-int8", made.choices[0].text)
