"""Whether a config.json says something that its model file has not asked for: it is refused, never ignored.

What a key means is known by transformers' own config class of the model type: a key that it has, with another
value than its default, would change the answers there. Keys that it lacks change nothing there either, except
those of other architectures' that a fork of the code may have honoured.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader, show

NEUTRAL = frozenset({
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map",
    "_name_or_path", "initializer_range", "use_cache", "attention_dropout", "embd_pdrop", "resid_pdrop",
    "hidden_dropout",
    "pad_token_id", "eod_token_id", "pretraining_tp", "id2label", "label2id", "problem_type", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward",
})  # fmt: skip
"""Keys of such classes that do not change what is computed, or say it again."""

SWITCHES = frozenset({
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qk_norm", "clip_qkv", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale",
})  # fmt: skip
"""Keys that would change the model wherever they are honoured; only false, 0 and null are taken."""


def check_unread(config: ConfigReader, model_type: str) -> None:
    """CheckpointError for the first key that is honoured elsewhere, but that the model file has not read."""
    unread = {key: value for key, value in config.unread().items() if key not in NEUTRAL}
    for key, value in unread.items():
        if key in SWITCHES and value:
            raise _refused(config, model_type, key, value)
    for key, value in (unread and _honoured(unread, model_type)).items():
        raise _refused(config, model_type, key, value)


def _honoured(unread: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Those that transformers knows, with other values than its defaults."""
    known = _defaults(model_type)
    return {key: value for key, value in unread.items() if key in known and value != known[key]}


def _defaults(model_type: str) -> dict[str, Any]:
    """The keys of the config class, with their defaults; none where the installed transformers lacks it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch: none is needed
    from transformers import CONFIG_MAPPING  # takes seconds, and is needed only where something is left over

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
