"""Rejects a config.json with settings that the model file has not read: they are never ignored.

transformers' config class of the model type says what a key means (nearfar.step.defaults has its defaults).
A key of that class with another value than its default would change the model's answers in transformers. Keys
that the class lacks change nothing there, except keys of other architectures that a fork of the code may have
honoured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.build.weights.quantized.settings import PLACES
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader, show
from nearfar.step.defaults import defaults_of

NEUTRAL = frozenset({
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map",
    "_name_or_path", "initializer_range", "use_cache", "attention_dropout", "embd_pdrop", "resid_pdrop",
    "hidden_dropout",
    "pad_token_id", "eod_token_id", "pretraining_tp", "id2label", "label2id", "problem_type", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", *PLACES,
})  # fmt: skip
"""Keys of these classes that do not change the computation, or repeat another key;
nearfar.build.weights.quantized reads those of quantized weights.
"""

SWITCHES = frozenset({
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qk_norm", "clip_qkv", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale",
})  # fmt: skip
"""Keys that would change the model wherever they are honoured; only false, 0 and null are accepted."""


ALWAYS = frozenset({"is_causal"})
"""Keys that would change the model wherever they are honoured; only true and null are accepted. With a false
is_causal transformers lets any decoder attend to later positions, though no class has the key.
"""


def check_unread(config: ConfigReader, model_type: str) -> None:
    """Raise CheckpointError for the first key that transformers honours and the model file has not read."""
    unread = {key: value for key, value in config.unread().items() if key not in NEUTRAL}
    for key, value in unread.items():
        if (key in SWITCHES and value) or (key in ALWAYS and value is not True):
            raise _refused(config, model_type, key, value)
    for key, value in (unread and _honoured(unread, model_type)).items():
        raise _refused(config, model_type, key, value)


def foreign_code(config: ConfigReader, model_type: str) -> str | None:
    """A note for the user where a config names code of its own for the model (`auto_map`), which is never
    run; else None.
    """
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
    known = defaults_of(model_type)  # a model file may have no default values yet
    return {key: value for key, value in unread.items() if key in known and value != known[key]}


def _refused(config: ConfigReader, model_type: str, key: str, value: object) -> CheckpointError:
    return config.error(
        f"{config.within}{key} is {show(value)}, which nearfar's {model_type} does not compute: its answers "
        "would differ from the model's. Remove the key if it means nothing in this checkpoint; if it does, "
        f"it needs step/models/{model_type}.py (docs/adding-a-model.md)"
    )
