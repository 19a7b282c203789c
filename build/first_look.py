"""What a model's config.json alone says of whether it can be built: before its weights are downloaded, a
compiler is looked for, or anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar import strict_json
from nearfar.errors import CheckpointError
from nearfar.hub import HUB_ID, check_there, no_path, text_of
from nearfar.step.kinds import writes_no_text
from nearfar.step.models import NESTED, check_known

CONFIG = "config.json"


def first_look(source: str) -> None:
    """CheckpointError for a checkpoint, here or on the hub, of an architecture that cannot be built; for a
    path that is not there; for a name of the hub that cannot be had.

    What has no config.json (GGUF, MLC), or none that can be read, is told by who opens it.
    """
    if (told := no_path(source)) is not None:
        raise CheckpointError(told)
    config = check_writes_text(source)
    if config is None:
        return
    model_type = config.get("model_type")
    inner = config.get("text_config")
    try:
        if not isinstance(model_type, str) or model_type not in NESTED:
            check_known(config)
        elif isinstance(inner, Mapping):
            named = inner.get("model_type") or NESTED[model_type]
            check_known({**inner, "model_type": named}, "text_config.")
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def check_writes_text(source: str) -> Mapping[str, Any] | None:
    """The config of a checkpoint, here or on the hub, where there is one that can be read; CheckpointError
    for that of a model that writes no text, which transformers would load with a head of random numbers.
    """
    config = _config(source)
    if config is not None and (what := writes_no_text(config)):
        raise CheckpointError(f"{source}: config.json: {what}")
    return config


def _config(source: str) -> Mapping[str, Any] | None:
    path = Path(source).expanduser()
    if path.exists():
        text = (path / CONFIG).read_bytes() if (path / CONFIG).is_file() else None
    else:
        named = HUB_ID.fullmatch(source)
        if named and named["wanted"] is not None:
            check_there(named["repository"])  # a repository of GGUF files has no configuration
        text = text_of(named["repository"], CONFIG) if named and named["wanted"] is None else None
    try:
        read = None if text is None else strict_json.loads(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None
