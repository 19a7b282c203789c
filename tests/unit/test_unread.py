"""Unread keys of a config: keys that transformers knows are rejected, by frozen defaults."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nearfar.build.unread import check_unread
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
from nearfar.step.defaults import DEFAULTS
from nearfar.step.models import architectures
from scripts.freeze_defaults import frozen
from tests.support.architectures import CASES

READ_ALL = """
import json, sys
sys.modules["torch"] = sys.modules["transformers"] = None  # as if they were not installed
from nearfar.build.unread import check_unread
from nearfar.step.reading import read_model
for config in json.load(sys.stdin):
    reading = read_model(config)
    check_unread(reading.config, reading.model_type)
    print(reading.model_type)
"""


def test_the_frozen_defaults_are_those_of_the_installed_transformers() -> None:
    """If this fails, run python scripts/freeze_defaults.py and read what has changed."""
    kept = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    assert kept == frozen()
    assert {"hidden_act", "head_dim"} <= kept["llama"].keys()


def test_every_architecture_is_read_without_transformers_and_torch() -> None:
    configs = [{"model_type": case.model_type, **case.config} for case in CASES]
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL], input=json.dumps(configs), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == set(architectures())


@pytest.mark.parametrize("key", ["nearfar_synth", "is_llama_config", "transformers.js_config"])
def test_a_note_that_no_class_has_is_taken(key: str) -> None:
    check_unread(ConfigReader({key: {"seed": 0}}), "llama")


def test_what_the_class_has_is_refused_unless_it_is_the_default() -> None:
    check_unread(ConfigReader({"head_dim": None, "hidden_act": "silu"}), "llama")
    with pytest.raises(CheckpointError, match='hidden_act is "relu"'):
        check_unread(ConfigReader({"hidden_act": "relu"}), "llama")
