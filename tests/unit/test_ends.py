"""An answer ends where its turn ends, whichever file of the checkpoint names the end token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.ends import end_tokens
from tests.support import speaking, tiny
from tests.support.commands import nearfar
from tests.support.late import late

models = late("nearfar.fallback_server.torch_engine.model")
options = late("nearfar.fallback_server.torch_engine.options")

BOS, END, USER = 256, 257, 259
SILENT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the tokenizer alone": ({"eos_token_id": None}, {"chat_template": SILENT}),
    "the template alone": ({"eos_token_id": None}, {"eos_token": None}),
    "both, and another in the config": ({"eos_token_id": BOS}, {}),
    "the config alone": ({}, {"eos_token": None, "chat_template": SILENT}),
    "all of them": ({}, {}),
}
"""config.json and tokenizer_config.json, by the file that names the end of a turn."""


@pytest.mark.parametrize("form", FORMS)
def test_a_built_model_ends_its_turn(form: str, tmp_path: Path) -> None:
    config, text = FORMS[form]
    source, out = speaking.make(tmp_path / "m", config=config, tokenizer_config=text), tmp_path / "out"
    done = nearfar("build", source, "--target", "mlx", "--quant", "none", "-o", out)
    assert done.returncode == 0, done.stderr
    told = "answers end at <|end|>, too" in done.stderr
    assert told == (config != {})
    # the prompt is raw, because not all models have a template that begins an answer
    prompt = "<|assistant|>"
    done = nearfar("run", out, prompt, "--raw", "--json", "--temperature", 0, "--max-tokens", 16)
    (choice,) = json.loads(done.stdout)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi!", "stop")
    # the end tokens as mlx-lm reads them
    assert END in json.loads((out / "mlx" / "config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("form", FORMS)
def test_a_served_checkpoint_ends_its_turn(form: str, tmp_path: Path) -> None:
    config, text = FORMS[form]
    path = speaking.make(tmp_path / "m", config=config, tokenizer_config=text)
    loaded = models.load_model(path, options.TorchOptions(device="cpu", dtype="float32", native=False))
    assert loaded.facts.eos_token_ids[-1] == END
    assert config.get("eos_token_id") in (None, loaded.facts.eos_token_ids[0])


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m['content'] }}<|end|>\n{% endfor %}", (END,)),
        ("{% for m in messages %}{{ m['content'] }} \n <|end|>{% endfor %}", (END,)),
        ("{% for m in messages %}{{ m['content'] }}<|end|><|bos|>{% endfor %}", (END,)),
        ("{% for m in messages %}<|end|>{{ m['content'] }}{% endfor %}", ()),
        ("{% for m in messages %}{{ m['content'] }}, <|end|>{% endfor %}", ()),
        # this end is not a special token
        ("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}", (261,)),
        ("{{ raise_exception('no') }}<|end|>", ()),
        ("{{ messages[0]['content'] }}<|end|>", ()),
        (None, ()),
    ],
)
def test_what_a_template_writes_behind_an_answer(template: str | None, ends: tuple[int, ...]) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False), AddedToken("<|im_", special=False)])
    codec = TextCodec(tokenizer, {}, template, BOS)
    assert end_tokens(codec, (), 263) == ends
    assert end_tokens(codec, (USER,), 261) == (USER, *(token for token in ends if token < 261))


def test_a_token_that_the_vocabulary_lacks_ends_nothing() -> None:
    codec = TextCodec(tiny.tokenizer(), {"eos_token": "<|gone|>"}, None, BOS)
    assert end_tokens(codec, (END,), 261) == (END,)
