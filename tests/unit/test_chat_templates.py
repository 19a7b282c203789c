"""The chat template that a conversation gets, with tools and without: from a checkpoint, from a build's
output, and in transformers. web/test/template.test.ts tests the web package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nearfar.build.weights.checkpoint import DirectoryCheckpoint
from nearfar.edge_runtime.openai.prompts import ChatEncoder
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.files import ChatTemplates
from nearfar.errors import ArtifactError, CheckpointError
from tests.support import tiny
from tests.support.late import late
from tests.support.paths import ROOT

transformers = late("transformers")

CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/vectors/chat_templates.json").read_text())
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["case"]))
def test_a_conversation_gets_its_template(tmp_path: Path, case: dict[str, Any]) -> None:
    source = tmp_path / "source"
    write(source, case)
    checkpoint = DirectoryCheckpoint(source, "m", {}, {})
    if "refused" in case:
        with pytest.raises(ArtifactError, match=case["refused"]):
            TextCodec.open_directory(source, None)
        with pytest.raises(CheckpointError, match=case["refused"]):
            checkpoint.write_tokenizer(tmp_path / "written")
        return
    checkpoint.write_tokenizer(tmp_path / "written")
    wanted = (case["plain"], case["tools"])
    for folder in (source, tmp_path / "written"):
        assert chosen(TextCodec.open_directory(folder, None)) == wanted
    if not case.get("ours") and wanted != (None, None):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(source)
        assert (theirs.get_chat_template(), theirs.get_chat_template(tools=TOOLS)) == wanted
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "written")
        assert (theirs.get_chat_template(), theirs.get_chat_template(tools=TOOLS)) == wanted


def test_tools_are_told_by_their_own_template_in_its_own_format() -> None:
    plain = "{{ messages[0].content }}<think>"
    tools = "{{ tools[0].function.name }} {{ messages[0].content }} <tool_call>"
    codec = TextCodec(tiny.tokenizer(), {}, ChatTemplates(plain, tools), None)
    assert codec.answers.family == "hermes"
    assert codec.answers.reasoning is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert codec.decode(ChatEncoder(codec)(messages)) == "Hi<think>"
    assert codec.decode(ChatEncoder(codec, TOOLS)(messages)) == "f Hi <tool_call>"


def write(folder: Path, case: dict[str, Any]) -> None:
    files = dict(case.get("files", {}))
    config = {"chat_template": case["config"]} if "config" in case else {}
    files["tokenizer_config.json"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    tiny.tokenizer().save(str(folder / "tokenizer.json"))


def chosen(codec: TextCodec) -> tuple[str | None, str | None]:
    return codec.template_source(False), codec.template_source(True)
