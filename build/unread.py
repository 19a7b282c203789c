"""Whether a config.json says something that its model file has not asked for: it is refused, never ignored.

What a key means is known by transformers' own config class of the model type: a key that it has, with another
value than its default, would change the answers there. Keys that it lacks change nothing there either, except
those of other architectures' that a fork of the code may have honoured.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearfar.build.weights.packed.settings import PLACES
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader, show

NEUTRAL = frozenset({
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map",
    "_name_or_path", "initializer_range", "use_cache", "attention_dropout", "embd_pdrop", "resid_pdrop",
    "hidden_dropout",
    "pad_token_id", "eod_token_id", "pretraining_tp", "id2label", "label2id", "problem_type", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", *PLACES,
})  # fmt: skip
"""Keys of such classes that do not change what is computed, or say it again; those of quantized weights are
read by nearfar.build.weights.packed.
"""

SWITCHES = frozenset({
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qk_norm", "clip_qkv", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale",
})  # fmt: skip
"""Keys that would change the model wherever they are honoured; only false, 0 and null are taken."""


ALWAYS = frozenset({"is_causal"})
"""Keys that would change the model wherever they are honoured; only true and null are taken. transformers
lets any decoder look ahead where is_causal is false, though no class has the key.
"""


def check_unread(config: ConfigReader, model_type: str) -> None:
    """CheckpointError for the first key that is honoured elsewhere, but that the model file has not read."""
    unread = {key: value for key, value in config.unread().items() if key not in NEUTRAL}
    for key, value in unread.items():
        if (key in SWITCHES and value) or (key in ALWAYS and value is not True):
            raise _refused(config, model_type, key, value)
    for key, value in (unread and _honoured(unread, model_type)).items():
        raise _refused(config, model_type, key, value)


def foreign_code(config: ConfigReader, model_type: str) -> str | None:
    """A line where a config names code of its own for the model (`auto_map`), which is never run."""
    given = config.config.get("auto_map")
    named = (
        [str(code) for kind, code in given.items() if "Model" in kind] if isinstance(given, Mapping) else []
    )
    if not named:
        return None
    return (
        f"config.json names code of its own ({show(named[0])}), which is not run: the model is computed as "
        f"transformers' {model_type}"
    )


def _honoured(unread: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The unread keys that transformers knows and whose values differ from its defaults."""
    written = _written(unread)
    known = _defaults(model_type) if written else {}
    return {key: value for key, value in unread.items() if key in known and value != known[key]}


def _written(keys: Iterable[str]) -> set[str]:
    """The keys that the source of transformers' config classes has somewhere as a word, as their fields are;
    all keys where transformers is imported already or its source cannot be read.

    What is left over of a config is mostly notes of whoever made it, which no class has: looking through 4 MB
    takes 0.1 s, importing transformers 1 s of a processor, and 3 where PyTorch is installed.
    """
    sources = [] if "transformers" in sys.modules else _sources()
    if not sources:
        return set(keys)
    left = {key: re.compile(rf"\b{key}\b") for key in keys if key.isidentifier()}
    found: set[str] = set()
    for path in sources:
        text = path.read_text(encoding="utf-8")
        found |= {key for key, word in left.items() if key not in found and key in text and word.search(text)}
    return found


def _sources() -> list[Path]:
    """Files of the installed transformers that have its config classes, or what these inherit."""
    spec = find_spec("transformers")
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        if (root / "configuration_utils.py").is_file():
            return [*root.glob("*_utils.py"), *root.glob("*/**/configuration_*.py")]
    return []


def _defaults(model_type: str) -> dict[str, Any]:
    """The keys of the config class, with their defaults; none where the installed transformers lacks it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch: none is needed
    from transformers import CONFIG_MAPPING  # takes seconds, and is needed only for keys that it may know

    if model_type not in CONFIG_MAPPING:
        return {}
    fields = [field for field in dataclasses.fields(CONFIG_MAPPING[model_type]) if field.init]
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return made | {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _refused(config: ConfigReader, model_type: str, key: str, value: object) -> CheckpointError:
    return config.error(
        f"{config.within}{key} is {show(value)}, which nearfar's {model_type} does not compute: its answers "
        "would not be those of the model. Remove the key if it means nothing in this checkpoint; if it does, "
        f"it needs step/models/{model_type}.py (docs/adding-a-model.md)"
    )
