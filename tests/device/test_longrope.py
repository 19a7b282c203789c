"""LongRoPE: an engine takes the factors that fit its context, as transformers takes those that fit a text.

One artifact has both tables. If an engine's context is within the model's original one, so is each of its
texts, and transformers computes it with the short factors. Engines with a longer context equal transformers
for texts beyond the original context (tests/support/architectures.py has these cases).
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.snapshots.record import origin
from nearfar.errors import RequestError
from tests.support import tiny
from tests.support.architectures import CASES, checkpoint, reference
from tests.support.backends import require
from tests.support.cases import Case
from tests.support.parity import SMALL, check_answers
from tests.support.paths import WEB, node

ORIGINAL = 40
CASE = next(case for case in CASES if str(case) == "phi3-partial-long")
WITHIN = replace(CASE, context=ORIGINAL, prompts=(9, ORIGINAL))
TEXT = "A cat and a dog"
ANSWER = 12


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of the case, built for all of its positions."""
    out = tmp_path_factory.mktemp("longrope")
    targets = ("cpu", "mlx", "wasm")
    build(BuildOptions(str(checkpoint(CASE)), out, targets, "none", buckets=SMALL, cpu_features=("native",)))
    return out


@pytest.mark.parametrize("backend", ["cpu", "mlx-f32"])
@pytest.mark.parametrize(("case", "context"), [(WITHIN, ORIGINAL), (CASE, None)], ids=["short", "long"])
def test_the_context_of_an_engine_decides(
    artifacts: Path, backend: str, case: Case, context: int | None
) -> None:
    require(backend)
    target, _, precision = backend.partition("-")
    path = artifacts / target
    with Engine.load(path, kv_memory="4MB", precision=precision or None, context=context) as engine:
        assert engine.context == (context or 160)
        check_answers(case, engine)


def test_a_snapshot_is_of_one_table(artifacts: Path, tmp_path: Path) -> None:
    manifests = []
    for context in (ORIGINAL, ORIGINAL + 1, None):
        with Engine.load(artifacts / "cpu", kv_memory="4MB", context=context) as engine:
            manifests.append(origin(engine.manifest, engine.context).fingerprint)
    short, *long = manifests
    assert short not in long
    assert len(set(long)) == 1


def test_a_context_is_a_number_of_positions(artifacts: Path) -> None:
    for wrong in (0, "40", True):
        with pytest.raises(RequestError, match="context must be"):
            Engine.load(artifacts / "cpu", context=wrong)  # type: ignore[arg-type]


ASK = """
async function main(dist, model, prompt) {
  const { createEngine } = await import(`file://${dist}/node/index.js`);
  for (const contextLength of [%d, undefined]) {
    const engine = await createEngine(model, { contextLength });
    const asked = { prompt, max_tokens: %d, temperature: 0, ignore_eos: true, logprobs: 0 };
    const [{ logprobs }] = (await engine.completions.create(asked)).choices;
    console.log(JSON.stringify(logprobs.token_logprobs));
    await engine.dispose();
  }
}
main(...process.argv.slice(1));
"""


def test_the_context_of_an_engine_decides_in_javascript(artifacts: Path) -> None:
    if not (WEB / "dist" / "node" / "index.js").is_file():
        pytest.skip("the web package is not built (run `make setup`)")
    script = ASK % (ORIGINAL, ANSWER)
    command = [node(), "-e", script, str(WEB / "dist"), str(artifacts / "wasm"), TEXT]
    made = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert made.returncode == 0, made.stderr
    short, long = map(json.loads, made.stdout.splitlines())
    tokens, logits, expected = list(tiny.tokenizer().encode(TEXT).ids), reference(CASE), []
    for _ in range(ANSWER):
        row = logits(tokens)[-1]
        expected.append(float(row.max() - np.logaddexp.reduce(row)))
        tokens.append(int(row.argmax()))
    np.testing.assert_allclose(short, expected, atol=2e-2)
    assert np.abs(np.subtract(long, expected)).max() > 0.1, "the long factors are others"
