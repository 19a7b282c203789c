"""The difficulty score: vectors that TypeScript also passes, odd prompts, the size of the model, `nearfar
route score`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from nearfar.cli.route import route
from nearfar.errors import NearfarError, RequestError
from nearfar.routing.difficulty import Difficulty, messages_to_prompt, score
from nearfar.routing.difficulty.features import HALF, features, parts
from nearfar.routing.difficulty.score import MODEL, rank
from nearfar.routing.difficulty.training import (
    GSM8K,
    GradedPrompt,
    choice_features,
    fit_head,
    folds,
    logistic,
    read_routellm,
    tabulate,
    train,
    within,
)
from tests.shared_data import shared_data

ROOT = Path(__file__).parents[2]
VECTORS: dict[str, Any] = json.loads(
    (ROOT / "tests/vectors/routing/difficulty.json").read_text(encoding="utf-8")
)
CATEGORIES: dict[str, str] = json.loads(
    (ROOT / "scripts/difficulty_lexicon.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", VECTORS["prompts"], ids=lambda case: case["name"])
def test_vectors(case):
    assert score(case["prompt"] * case["times"]) == pytest.approx(case["score"], abs=1e-6)


def test_vectors_of_conversations():
    for case in VECTORS["messages"]:
        assert messages_to_prompt(case["messages"]) == case["prompt"]


def test_the_vectors_are_many_and_spread():
    scores = [case["score"] for case in VECTORS["prompts"]]
    assert len(scores) >= 50
    assert len(set(scores)) > 40
    assert min(scores) < 0.1
    assert max(scores) > 0.8


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=400))
def test_any_text_has_a_score(prompt):
    assert 0.0 <= score(prompt) <= 1.0
    assert score(prompt) == score(prompt)


def test_a_long_prompt_is_read_at_both_ends_only():
    head, tail = "Why? " * HALF, "What is 2 + 2? " * HALF
    read = parts(head + "x" * 1_000_000 + tail)
    assert len(read.text) == 2 * HALF + 1
    assert score(head + "x" * 1_000_000 + tail) == score(head + "y" * 10 + tail)


def test_work_makes_harder_and_small_talk_is_easy():
    assert score("Hi!") < score("What is the capital of France?") < 0.5
    hard = (
        "A tank holds 240 litres. Pipe A fills it in 3 hours, pipe B in 5, and a leak, which opens when it "
        "is half full, "
    )
    hard += (
        "empties 12 litres an hour. If both pipes start at noon, when is it full, and how much has leaked "
        "by then?"
    )
    assert score(hard) > 0.5


def test_options_are_found_in_their_usual_forms():
    for begin in ("A. ", "A) ", "(A) ", "  A: "):
        second = begin.replace("A", "B")
        assert parts(f"Which?\n{begin}one\n{second}two\nAnswer:").options == ("one", "two")
    assert not parts("A. Smith wrote it. B. Jones read it.").choice


def test_a_feature_that_depends_on_options_is_absent_without_them():
    choice, found = features("Which is it?", list(CATEGORIES), {})
    assert not choice
    assert not any(name.startswith("option_") for name in found)


def test_the_model_is_small_and_of_its_own_lexicon():
    assert MODEL.stat().st_size < 20_000  # the router's page pays for every byte
    assert json.loads(MODEL.read_text(encoding="utf-8"))["categories"] == CATEGORIES


def test_rank_is_linear_between_knots_and_closed_at_the_ends():
    knots = (0.1, 0.2, 0.4)
    assert [rank(value, knots) for value in (0.0, 0.1, 0.15, 0.2, 0.3, 0.4, 0.9)] == pytest.approx(
        [0, 0, 0.25, 0.5, 0.75, 1, 1]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"heads": {}}, "'open'"),
        ({"weights": [1.0]}, "differ in length"),
        ({"features": "unheard_of"}, "unknown features unheard_of"),
    ],
)
def test_a_model_that_is_none_is_refused(tmp_path, change, message):
    data = json.loads(MODEL.read_text(encoding="utf-8"))
    head = data["heads"]["open"]
    if "weights" in change:
        head["weights"] = change["weights"]
    elif "features" in change:
        head["features"] = [change["features"], *head["features"][1:]]
    else:
        data |= change
    file = tmp_path / "model.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(NearfarError, match=message):
        Difficulty.load(file)
    with pytest.raises(NearfarError, match="not a difficulty model"):
        Difficulty.load(tmp_path / "absent.json")


def made_up(subject: str, hard: float, count: int, random: np.random.Generator) -> list[GradedPrompt]:
    """Questions of a subject with its own difficulty; the longer a question, the likelier the weak model
    fails it.
    """
    found = []
    for _ in range(count):
        words = int(random.integers(3, 60))
        weak = bool(random.random() > hard + 0.008 * words)
        prompt = " ".join(["word"] * words) + "?"
        if subject != GSM8K:
            prompt += "\nA. yes\nB. no"
        found.append(GradedPrompt(subject, prompt, weak, weak or bool(random.random() < 0.8)))
    return found


def test_training_finds_what_holds_in_every_subject_and_is_repeatable():
    random = np.random.default_rng(1)
    examples = made_up(GSM8K, 0.2, 300, random)
    for at, hard in enumerate((0.05, 0.2, 0.4)):
        examples += made_up(f"subject {at}", hard, 200, random)
    model = train(examples, CATEGORIES)
    assert model == train(examples, CATEGORIES)
    scored = Difficulty.from_json(model)
    assert scored.score("word " * 4 + "?") + 0.3 < scored.score("word " * 50 + "?")


def test_what_only_tells_subjects_apart_gets_no_weight():
    random = np.random.default_rng(2)
    examples = [GradedPrompt("easy", "day " * 9, True, True)] * 50
    examples += [GradedPrompt("hard", "court " * 9, bool(random.random() > 0.9), True) for _ in range(50)]
    table = tabulate(examples, CATEGORIES, options=False)
    head = fit_head(table, ("has_law", "has_time"), table.failed, 1.0)
    assert max(map(abs, head.weights)) < 1e-9
    assert np.abs(within(table.failed, table.subjects).reshape(2, 50).sum(axis=1)).max() < 1e-9


def test_folds_keep_subjects_whole():
    subjects = np.repeat([f"s{at}" for at in range(7)], 5)
    masks = folds(subjects, 3, 0)
    assert np.array_equal(np.sum(masks, axis=0), np.ones(35))
    for mask in masks:
        assert not set(subjects[mask]) & set(subjects[~mask])


def test_logistic_recovers_its_own_curve():
    random = np.random.default_rng(0)
    x = random.normal(size=20000)
    labels = (random.random(20000) < 1 / (1 + np.exp(-(1.5 * x - 0.7)))).astype(float)
    assert logistic(x, labels, np.ones_like(x)) == pytest.approx((1.5, -0.7), abs=0.08)


def test_the_shipped_model_is_what_the_data_gives():
    data = shared_data("eval", "routellm")
    command = [sys.executable, str(ROOT / "scripts/train_difficulty.py"), "--data", str(data), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_training_data_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NearfarError, match=str(tmp_path)):
        read_routellm(tmp_path)


def test_choice_features_leave_out_what_repeats():
    table = tabulate(made_up("s", 0.2, 3, np.random.default_rng(0)), CATEGORIES, options=True)
    assert not [name for name in choice_features(table) if name.startswith(("has_", "share_"))]


def run_score(*arguments: str, stdin: bytes = b"") -> Any:
    return CliRunner().invoke(route, ["score", *arguments], input=stdin, catch_exceptions=True)


def test_route_score_writes_a_line_a_prompt_in_order(tmp_path):
    prompts = ["Hi!", "", "Prove it.\u2028And twice", "x" * 30_000, "🚀"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"id": at, "prompt": prompt}) for at, prompt in enumerate(prompts)]
    source.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    ran = run_score("--input", str(source), "--output", str(target))
    assert ran.exit_code == 0, ran.output
    written = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert written == [{"difficulty": pytest.approx(score(prompt), abs=1e-6)} for prompt in prompts]
    assert run_score("-i", "-", stdin=source.read_bytes()).stdout == target.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: not JSON"),
        (b"\xff\xfe", "line 2: not UTF-8"),
        (b"[]", 'line 2: a list without a text "prompt"'),
        (b'{"text": "x"}', 'line 2: a record without a text "prompt" (found: none)'),
        (b'{"prompt": 3}', "found: a number"),
        (b'{"prompt": null}', "found: null"),
        (b"[" * 100_000, "line 2: not JSON"),
    ],
)
def test_route_score_names_file_and_line(tmp_path, line, message):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    ran = run_score("--input", str(source))
    assert isinstance(ran.exception, RequestError)
    assert str(source) in str(ran.exception)
    assert message in str(ran.exception)
    assert len(ran.stdout.splitlines()) == 1


def test_route_score_names_files_that_it_cannot_use(tmp_path):
    absent, source = tmp_path / "absent.jsonl", tmp_path / "in.jsonl"
    source.write_text('{"prompt": ""}\n', encoding="utf-8")
    for arguments, message in [
        (["--input", str(absent)], "cannot be read"),
        (["--input", str(source), "--output", str(tmp_path / "no" / "out")], "cannot be written"),
        (["--input", str(source), "--output", str(source)], "is the input file"),
    ]:
        assert message in str(run_score(*arguments).exception)
    assert source.read_text(encoding="utf-8") == '{"prompt": ""}\n'


def test_route_score_streams_and_stops_cleanly():
    command = [sys.executable, "-m", "nearfar", "route", "score", "--input", "-"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as running:
        assert isinstance(running.stdin, io.IOBase)
        running.stdin.write(b'{"prompt": "Hi!"}\n')
        running.stdin.flush()
        assert json.loads(running.stdout.readline()) == {"difficulty": pytest.approx(score("Hi!"), abs=1e-6)}
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
        error = running.stderr.read().decode()
    assert "Traceback" not in error


def test_route_score_survives_a_reader_that_leaves():
    command = (
        f"yes '{{\"prompt\": \"Hi!\"}}' | head -n 20000 | '{sys.executable}' -m nearfar route score -i - | "
        "head -n 1"
    )
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["difficulty"] == pytest.approx(score("Hi!"), abs=1e-6)
    assert ran.stderr == ""
