"""From config.json to a model: chooses the model file, and the checkpoint's names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
from nearfar.step.defaults import given_defaults
from nearfar.step.model import Model
from nearfar.step.models import ALIASES, NESTED, architecture, text_type
from nearfar.step.params import Param

SPELLINGS = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
    ("model.text_model.", "lm_head."),
    ("model.", "lm_head."),
)
"""The prefixes that stand for "model." and "lm_head." in multimodal checkpoints, in all spellings in use."""

DRAFTS = "mtp."
"""The prefix of tensors of layers that draft tokens (multi-token prediction)."""
OTHER_PARTS = (
    "vision_tower.", "vision_model.", "vision_projector.", "visual.", "connector.", "multi_modal_projector.",
    "image_newline", "audio_tower.", "embed_vision.", "embed_audio.", DRAFTS,
)  # fmt: skip
"""Prefixes of tensors of other parts than the text model, with or without "model." in front."""

FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose published files have the keys of the text model beside those of the whole."""

WITHIN = "text_config."
AROUND = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype")
"""Keys beside `text_config` that apply to the text model if it lacks them."""


@dataclass(frozen=True)
class Reading:
    """A model, the reader of its config, and the checkpoint's tensors of other parts than text."""

    model: Model
    model_type: str
    config: ConfigReader
    skipped: tuple[str, ...] = ()


def read_model(
    config: Mapping[str, Any],
    tensors: Collection[str] = (),
    context: int | None = None,
    tied: bool | None = None,
) -> Reading:
    """The model of a config.json, with at most `context` positions; CheckpointError if it is not supported.

    `tensors`: names in the checkpoint, by which a multimodal checkpoint's text model is found. `tied`:
    whether the head is the embedding; None: as the config says.
    """
    if tied is not None:
        config = {**config, "tie_word_embeddings": tied}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in NESTED:
        read = ConfigReader(config)
        filled = read.filled(given_defaults(str(model_type)) if str(model_type) in ALIASES else {})
        model = _spelled(architecture(config).model(filled, context), tensors)
        return Reading(model, str(model_type), read, _other_parts(tensors, (DRAFTS,)))
    inner = _text_config(config, model_type, tensors)
    if tied is not None:
        inner["tie_word_embeddings"] = tied
    read = ConfigReader(inner, within=WITHIN if "text_config" in config else "")
    # Published files leave out keys with the default of transformers' class, sizes too.
    filled = read.filled(given_defaults(inner["model_type"]))
    model = architecture(inner, read.within).model(filled, context)
    model = _spelled(model.renamed(_spelling(tensors)), tensors)
    return Reading(model, inner["model_type"], read, _other_parts(tensors, OTHER_PARTS))


def _other_parts(tensors: Collection[str], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors of other parts than the text model, by the beginnings of their names."""
    return tuple(name for name in tensors if name.removeprefix("model.").startswith(prefixes))


def _text_config(config: Mapping[str, Any], model_type: str, tensors: Collection[str]) -> dict[str, Any]:
    """`text_config`, completed from the keys around it: end tokens, dtype, and whether the head is the
    embedding. In a file without it, of a type of FLAT, the keys of the whole.
    """
    given = config.get("text_config")
    if given is None and model_type in FLAT:
        flat = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
        return {**flat, "model_type": NESTED[model_type]}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: text_config is {type(given).__name__}; expected an object")
    around = {key: config[key] for key in AROUND if config.get(key) is not None}
    inner = {
        **around,
        **{key: value for key, value in given.items() if key not in around or value is not None},
    }
    tied = config.get("tie_word_embeddings")
    if tied is None or (tied is False and given.get("tie_word_embeddings") is True):
        tied = not any("lm_head." in name for name in tensors)
    return {**inner, "model_type": text_type(model_type, given), "tie_word_embeddings": tied}


def _spelling(tensors: Collection[str]) -> Callable[[str], str]:
    """A function from a model file's names of tensors to the checkpoint's; CheckpointError if the text model
    is not found.
    """
    found = [pair for pair in SPELLINGS if any(name.startswith(f"{pair[0]}layers.") for name in tensors)]
    if tensors and not found:
        starts = " or ".join(f"{start}*" for start, _ in SPELLINGS)
        raise CheckpointError(f"the checkpoint has no tensors {starts}: its text model was not found")
    inside, head = found[0] if found else SPELLINGS[0]

    def name(tensor: str) -> str:
        if tensor.startswith("lm_head."):
            return head + tensor.removeprefix("lm_head.")
        return inside + tensor.removeprefix("model.")

    return name


def without_prefix(model: Model) -> Model:
    """The model with tensors named without `model.`, as in checkpoints of models without a head."""
    return model.renamed(lambda name: name.removeprefix("model."))


def _spelled(model: Model, tensors: Collection[str]) -> Model:
    """The model with the pieces that the checkpoint stores, where a parameter has several spellings. The
    first tensor of a spelling tells whether the checkpoint has that spelling; of two spellings with the same
    tensor the second is taken if the shape of the first is another one.
    """
    step = model.step

    def spelled(param: Param) -> Param:
        pieces = step.spellings.get(param.name)
        if not pieces or pieces[0].tensor not in tensors:
            return param
        same = pieces[0].tensor == param.pieces[0].tensor
        return param if same and _fits(param, tensors) else replace(param, pieces=pieces)

    return replace(model, step=replace(step, params=tuple(map(spelled, step.params)), spellings={}))


def _fits(param: Param, tensors: Collection[str]) -> bool:
    """Whether the checkpoint's tensors of a parameter have its shapes, as far as they are known."""
    if not isinstance(tensors, Mapping):
        return True
    return all(tensors[name].shape == shape for name, shape in param.expected().items() if name in tensors)
