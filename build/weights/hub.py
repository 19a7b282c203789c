"""Downloads checkpoints from the Hugging Face hub into its own cache; a download continues where an earlier
one ended.

A repository of GGUF files alone holds one model in several quantizations. One is selected after a colon, as
in llama.cpp and Ollama: `owner/name:Q4_K_M`, or by a file's own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from nearfar.build.embedding import EMBEDDING_FILES
from nearfar.build.weights.checkpoint import CONFIG_FILES
from nearfar.build.weights.gguf.container import stem_of
from nearfar.build.weights.mlc_directory import LISTS, MLC_FILES
from nearfar.checkpoint_files import INDEX
from nearfar.edge_runtime.text.files import TOKENIZER_FILES
from nearfar.errors import CheckpointError
from nearfar.hub import HUB_ID, names_of, no_path, snapshot, weights_of

PATTERNS = (
    INDEX,
    *CONFIG_FILES,
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    *EMBEDDING_FILES,
    "LICENSE*",
    *MLC_FILES,
)
"""Patterns of the files that are downloaded in addition to the safetensors files with the weights."""
USUAL = ("Q4_K_M", "Q4_0", "Q8_0")
"""The default GGUF models of a repository: the first of these that it has."""
NO_MODEL = ("mmproj", "imatrix")
"""Words at the beginning or end of GGUF file names that are not language models: image projectors, importance
matrices.
"""


def download(source: str) -> Path:
    """Download the files of a hub repository that a build reads, as a directory in the hub's cache; of a
    repository of GGUF files, one file, or the first of its parts. Without a network, the cache's files are
    used.

    Raises CheckpointError for an invalid hub id, a failed download, or an ambiguous GGUF file.
    """
    if (told := no_path(source)) is not None:
        raise CheckpointError(told)
    named = HUB_ID.fullmatch(source)
    if named is None:
        raise CheckpointError(
            f"{source}: no such directory, and not a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct or "
            "owner/name-GGUF:Q4_K_M: check the path"
        )
    repository, wanted = named["repository"], named["wanted"]
    names = names_of(repository)
    models = _models(names)
    if wanted is None:
        weights = weights_of(repository, names)
        if weights or not models or any(name in names for name in LISTS):
            # missing files are reported when the checkpoint is opened
            return snapshot(repository, (*weights, *PATTERNS))
    files = choose(repository, models, wanted)
    return snapshot(repository, files) / files[0]


def choose(repository: str, models: Mapping[str, Sequence[str]], wanted: str | None) -> Sequence[str]:
    """The files of the wanted model, out of `models` by name. Raises CheckpointError where none, or several,
    match.
    """
    listed = ", ".join(sorted(PurePosixPath(name).name for name in models))
    if wanted is None:
        found = list(models) if len(models) == 1 else []
        for usual in USUAL:
            found = found or [name for name in models if _is_called(name, usual)]
        advice = f"say which one, as {repository}:Q4_K_M"
    else:
        found = [name for name in models if _is_called(name, wanted)]
        advice = "say more of its name" if found else "say one of these"
    if len(found) == 1:
        return models[found[0]]
    meant = f"{repository}:{wanted}" if wanted is not None else repository
    what = "could be several of" if found else "is none of" if wanted is not None else "has"
    raise CheckpointError(f"{meant} {what} the GGUF models {listed or '(there are none)'}: {advice}")


def _is_called(name: str, wanted: str) -> bool:
    """Whether a model's name is `wanted`, or ends with it as a word: its quantization."""
    name, wanted = name.lower(), wanted.lower().removesuffix(".gguf")
    return name == wanted or PurePosixPath(name).name == wanted or name.endswith((f"-{wanted}", f".{wanted}"))


def _models(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models, by their files' names without part number and suffix; each with its parts in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix != ".gguf" or path.stem.startswith(NO_MODEL) or path.stem.endswith(NO_MODEL):
            continue
        models.setdefault(str(path.with_name(stem_of(path.name))), []).append(file)
    return models
