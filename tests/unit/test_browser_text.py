"""A build for browsers rejects, by name, whatever a browser would read as another text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.targets import target_of
from tests.support.commands import nearfar

SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sample-model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "model"))


@pytest.mark.parametrize("target", ["wasm", "webgpu"])
def test_a_template_that_browsers_cannot_render(model: Path, tmp_path: Path, target: str) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content|urlize }}{% endfor %}")
    done = nearfar("build", model, "--target", f"cpu,{target}", "-o", tmp_path / "out")
    assert done.returncode == 1
    assert (
        f"error: target {target}: chat_template.jinja has the filter 'urlize' in line 2, which the web "
        "engine does not render as transformers does. Write that in another way, or build for other targets "
        "(--target cpu)"
    ) in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_named_template_and_a_tokenizer_that_browsers_cannot_follow(model: Path) -> None:
    file = json.loads((model / "tokenizer.json").read_text())
    file["normalizer"] = {"type": "Nmt"}
    (model / "tokenizer.json").write_text(json.dumps(file))
    options = BuildOptions(str(model), model / "out", ("wasm",), "q4")
    with pytest.raises(
        Exception, match=r"tokenizer.json has the normalizer Nmt, which the web engine does not"
    ):
        target_of("wasm").check(open_source(options), options)
    target_of("cpu").check(open_source(options), options)
    config = json.loads((model / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{{ x|pprint }}"}]
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    with pytest.raises(Exception, match=r"tool_use.jinja has the filter 'pprint' in line 1"):
        target_of("wasm").check(open_source(options), options)
