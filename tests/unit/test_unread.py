"""Keys of a config that nobody read: most are told to be nobody's without importing transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nearfar.build import unread
from nearfar.step.models import NESTED, architectures

_LOOK = """
import json, sys
from nearfar.build.unread import check_unread
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
try:
    check_unread(ConfigReader(json.loads(sys.argv[1])), "llama")
except CheckpointError as error:
    print("refused", str(error).split()[1])
print("transformers" in sys.modules)
"""


def _looked(**config: object) -> list[str]:
    done = subprocess.run([sys.executable, "-c", _LOOK, json.dumps(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_notes_that_no_class_has_import_nothing() -> None:
    assert _looked(nearfar_synth={"seed": 0}, is_llama_config=True, **{"transformers.js_config": {}}) == [
        "False"
    ]


def test_what_the_class_has_is_refused_by_its_default() -> None:
    assert _looked(is_llama_config=True, head_dim=None, hidden_act="silu") == ["True"]
    assert _looked(hidden_act="relu") == ["refused", "hidden_act", "True"]


def test_every_field_of_a_class_is_found_in_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    fields = {field for name in (*architectures(), *NESTED) for field in unread._defaults(name)}
    assert {"hidden_act", "architectures", "num_kv_shared_layers"} <= fields  # its own, its base.s, another.s
    monkeypatch.delitem(sys.modules, "transformers")
    assert unread._written(fields) == fields


def test_all_are_asked_for_where_there_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(unread, "find_spec", lambda name: None)
    assert unread._written(["nobody_s"]) == {"nobody_s"}
