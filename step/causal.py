"""The model types that the installed transformers loads as causal language models. They are read from its
source, since importing it takes seconds.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from nearfar.step.kinds import DOES, torch_refuses

_FILE = "models/auto/modeling_auto.py"
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_READ_WHOLE = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
"""Tables of encoder-decoder types whose decoder alone is in the first table too. Without their encoder they
answer nothing.
"""


def not_causal(config: Mapping[str, Any]) -> str | None:
    """Why transformers does not load the model of a config.json as a causal language model; None where it
    does, or where its table is unknown.
    """
    kind, types = config.get("model_type"), causal_types()
    if config.get("is_decoder") is not True:
        types -= encoder_decoder_types()
    if not isinstance(kind, str) or not types or kind in types:
        return None
    own = config.get("auto_map")
    if isinstance(own, Mapping) and "AutoModelForCausalLM" in own:
        return (
            f"model_type is {kind!r}, for which the checkpoint brings code of its own (auto_map): nearfar "
            "runs no code of checkpoints, and transformers knows no such model that writes text"
        )
    return (
        f"model_type is {kind!r}, which transformers does not know as a model that writes text token by "
        f"token. {DOES}. If it does write text, a newer transformers may know it: pip install -U transformers"
    )


def others_for(config: Mapping[str, Any]) -> str:
    """A sentence about what else may run a model that nearfar does not build."""
    front = "nearfar serve URL goes in front of a server that does"
    if why := torch_refuses(config):
        return f"nearfar serve does not answer with it either, for {why}: {front}"
    if not_causal(config) is not None:
        return (
            "nearfar serve does not answer with it either, for the installed transformers knows no such "
            f"model that writes text: {front}"
        )
    return (
        "nearfar serve tries it through transformers, without a build (it needs PyTorch: pip install "
        "'nearfar[server]')"
    )


def causal_types() -> frozenset[str]:
    """The causal model types; empty where transformers is not installed or keeps its table in another way."""
    return _tables().get(_CAUSAL, frozenset())


def encoder_decoder_types() -> frozenset[str]:
    """Model types that read or hear a whole input before they write."""
    return frozenset[str]().union(*(_tables().get(name, frozenset()) for name in _READ_WHOLE))


@functools.cache
def _tables() -> dict[str, frozenset[str]]:
    found = PathFinder.find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    try:
        tree = ast.parse((Path(found.origin).parent / _FILE).read_text(encoding="utf-8"))
        return {
            name: frozenset(kind for kind, _ in ast.literal_eval(node.value.args[0]))
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args
            for name in (target.id for target in node.targets if isinstance(target, ast.Name))
            if name in (_CAUSAL, *_READ_WHOLE)
        }
    except (OSError, SyntaxError, ValueError, TypeError):
        return {}
