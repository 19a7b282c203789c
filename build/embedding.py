"""Recognizes embedding models by the files that sentence-transformers saves with a checkpoint.

modules.json lists what the hidden states go through: Transformer, Pooling (1_Pooling/config.json says which),
Normalize. Supported is the last token's state, normalized by L2 ("Qwen3 Embedding", 2025).
"""

from __future__ import annotations

from pathlib import Path

from nearfar.errors import CheckpointError
from nearfar.pooling import MODULES, modes_of, modules_of, read

SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
EMBEDDING_FILES = (MODULES, SETTINGS, TRANSFORMER, "*_Pooling/config.json")
"""Patterns of all files that are read here."""
LAST = "lasttoken"
ADVICE = "nearfar makes embeddings of the last token's state, normalized"


def gives_embeddings(checkpoint: Path, asked: bool) -> bool:
    """Whether to build an embedding model: the checkpoint says that it is one, or `asked` is true. Raises
    CheckpointError where it pools in another way.

    With `asked`, its settings of normalization and of a default prompt are ignored.
    """
    modules = modules_of(checkpoint)
    if modules is None:
        return asked
    kinds = [kind for kind, _ in modules]
    if strange := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise CheckpointError(f"{checkpoint / MODULES}: module {strange[0]!r} is not supported; {ADVICE}")
    for kind, module in modules:
        if kind == "Pooling" and (on := modes_of(checkpoint, module)) != [LAST]:
            file = checkpoint / str(module.get("path")) / "config.json"
            raise CheckpointError(f"{file}: pooling is {', '.join(on) or 'not named'}; {ADVICE}")
    if asked:
        return True
    if "Pooling" not in kinds or "Normalize" not in kinds:
        raise CheckpointError(
            f"{checkpoint / MODULES}: it has modules {', '.join(kinds)}, and {ADVICE}: if that is good "
            "enough, build with --embeddings"
        )
    _check_prompt(checkpoint / SETTINGS)
    return True


def longest_text(checkpoint: Path) -> int | None:
    """The longest text in tokens that the checkpoint was made for; None where it does not say. Raises
    CheckpointError where it wants lower-cased texts, since its tokenizer does not lower-case them.
    """
    file = checkpoint / TRANSFORMER
    if not (checkpoint / MODULES).is_file() or not file.is_file():
        return None
    settings = read(file)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: expected an object")
    if settings.get("do_lower_case"):
        raise CheckpointError(f"{file}: do_lower_case is not supported: {ADVICE}, of texts as they are")
    most = settings.get("max_seq_length")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise CheckpointError(f"{file}: max_seq_length is {most!r}, expected a whole number of at least 1")
    return most


def _check_prompt(file: Path) -> None:
    """Raise CheckpointError where the settings put a default prompt before every text: users write prompts
    themselves.
    """
    settings = read(file) if file.is_file() else {}
    name = settings.get("default_prompt_name") if isinstance(settings, dict) else None
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    if name is not None and isinstance(prompts, dict) and prompts.get(name):
        raise CheckpointError(
            f"{file}: default_prompt_name {name!r} would begin every text with {str(prompts[name])[:80]!r}, "
            "which nearfar does not add: build with --embeddings, and write it before your texts"
        )
