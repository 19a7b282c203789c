"""Checks whether a checkpoint can be built, by its small files alone: before its weights are downloaded, a
compiler is searched for, or anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar.build.adapters import adapter_at, pair_of
from nearfar.checkpoint_files import ADAPTER, check_no_adapter
from nearfar.edge_runtime.text.files import NO_TEMPLATE
from nearfar.errors import ArtifactError, CheckpointError, RequestError
from nearfar.hub import HUB_ID, check_there, no_path, snapshot, text_of
from nearfar.step.causal import others_for
from nearfar.step.kinds import CONFIG, check_writes_text, config_in, config_of
from nearfar.step.models import NESTED, check_known, text_type


def first_look(
    source: str, context: int | None = None, embeddings: bool = False, adapter: str | None = None
) -> None:
    """Raise CheckpointError for a checkpoint, local or on the hub, whose settings rule out a build, for a
    path that does not exist, and for a hub name that cannot be fetched. `context`, `embeddings` and
    `adapter` are the build's options; the adapter's settings are checked, too.

    A checkpoint without a readable config.json (GGUF, MLC) is checked when it is opened.
    """
    if (told := no_path(source)) is not None:
        raise CheckpointError(told)
    pair = pair_of(source, adapter)
    source = pair.checkpoint
    if pair.adapter is not None:
        from nearfar.build.weights.lora import check_config  # imports NumPy

        check_config(adapter_at(pair.adapter, beside_model=True) or {}, f"{pair.adapter}: {ADAPTER}")
    try:
        if pair.adapter is not None and (told := no_path(source)) is not None:
            raise CheckpointError(told)
        config = config_at(source)
    except CheckpointError as error:
        if pair.adapter is None:
            raise
        raise CheckpointError(f"{error} (the model of the adapter {pair.adapter})") from error
    if config is not None:
        check_writes_text(config, source)
        _check_buildable(source, config, context, embeddings)


def check_chats(source: str) -> None:
    """Raise RequestError for a checkpoint without a chat template, as far as its small files, or the header
    of a local GGUF file, say. For an adapter the files of its model decide.
    """
    source = pair_of(source, None).checkpoint
    path = Path(source).expanduser()
    # late, because the module imports NumPy
    from nearfar.build.weights.gguf.header import is_gguf, read_header

    if is_gguf(path):
        there = any(key.startswith("tokenizer.chat_template") for key in read_header(path).metadata)
    elif config_at(source) is not None:
        from nearfar.build.weights.checkpoint import DirectoryCheckpoint

        folder = _settings(source)
        there = bool(DirectoryCheckpoint(folder, folder.name, {}, {}).chat_templates.all)
    else:
        return
    if not there:
        raise RequestError(f"{source}: {NO_TEMPLATE}")


def _check_buildable(source: str, config: Mapping[str, Any], context: int | None, embeddings: bool) -> None:
    folder = None
    model_type = config.get("model_type")
    inner = config.get("text_config")
    try:
        if not isinstance(model_type, str) or model_type not in NESTED:
            check_known(config)
        elif isinstance(inner, Mapping):
            check_known({**inner, "model_type": text_type(model_type, inner)}, "text_config.")
        folder = _settings(source)
        _check_settings(folder, dict(config), context, embeddings)
    except CheckpointError as error:
        told = str(error) if folder is None else str(error).replace(str(folder), source)
        raise CheckpointError(told if told.startswith(source) else f"{source}: {told}") from error


def _check_settings(folder: Path, config: dict[str, Any], context: int | None, embeddings: bool) -> None:
    """Make the checks of `open_source` that need neither tensors nor the tokenizer's vocabulary; none for an
    MLC directory, whose settings are in another file.
    """
    from nearfar.build.embedding import gives_embeddings, longest_text
    from nearfar.build.unread import check_unread
    from nearfar.build.weights.checkpoint import DirectoryCheckpoint
    from nearfar.build.weights.mlc_directory import CONFIG as MLC_CONFIG
    from nearfar.build.weights.quantized import find_quantized
    from nearfar.edge_runtime.engine.sampling_params import defaults_of
    from nearfar.edge_runtime.text.templates import ChatTemplate
    from nearfar.step.reading import read_model

    if (folder / MLC_CONFIG).is_file():
        return
    check_no_adapter(folder, str(folder))
    embeds = gives_embeddings(folder, embeddings)
    context = context or (longest_text(folder) if embeds else None)
    try:
        reading = read_model(config, (), context)
        check_unread(reading.config, reading.model_type)
    except CheckpointError as error:  # other programs may compute this model
        raise CheckpointError(f"{error}. {others_for(config)}") from error
    checkpoint = DirectoryCheckpoint(folder, folder.name, config, {})
    find_quantized(checkpoint)
    try:
        defaults_of(checkpoint.generation_config)
        for template in checkpoint.chat_templates.all:
            ChatTemplate(template)
    except ArtifactError as error:
        raise CheckpointError(f"{error}: correct it, or download the checkpoint again") from error


def _settings(source: str) -> Path:
    """A folder with a checkpoint's small files that are read here, downloaded for a hub id."""
    from nearfar.build.embedding import EMBEDDING_FILES
    from nearfar.build.weights.checkpoint import CONFIG_FILES
    from nearfar.build.weights.mlc_directory import CONFIG as MLC_CONFIG
    from nearfar.edge_runtime.text.files import TEMPLATE_FILES

    path = Path(source).expanduser()
    wanted = (*CONFIG_FILES, *EMBEDDING_FILES, *TEMPLATE_FILES, "tokenizer_config.json", ADAPTER, MLC_CONFIG)
    return path if path.exists() else snapshot(source, wanted)


def config_at(source: str) -> Mapping[str, Any] | None:
    """Read the config of a checkpoint, local or on the hub; None where it has no readable one."""
    path = Path(source).expanduser()
    if path.exists():
        return config_in(path)
    named = HUB_ID.fullmatch(source)
    if named and named["wanted"] is not None:
        check_there(named["repository"])  # a repository of GGUF files has no configuration
    text = text_of(named["repository"], CONFIG) if named and named["wanted"] is None else None
    return None if text is None else config_of(text)
