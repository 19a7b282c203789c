"""LoRA adapters (Hu et al., 2021) as peft saves them: which tensors of their model they change, and how.

adapter_config.json says what was trained, adapter_model.safetensors has the matrices: a weight W becomes
W + scale · B · A, where scale is alpha / r, or alpha / √r (rslora, Kalajdzievski, 2023). A setting that would
change this and is not computed is rejected by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.build.adapters import WEIGHTS
from nearfar.build.weights.checkpoint import DirectoryCheckpoint, read_json
from nearfar.build.weights.headers import read_header
from nearfar.build.weights.quantize import F32, to_float32
from nearfar.checkpoint_files import ADAPTER
from nearfar.errors import CheckpointError
from nearfar.step.config import show

PREFIX = "base_model.model."
"""What peft puts before the names of the model's modules."""
PART = re.compile(r"(?P<module>.+)\.lora_(?P<which>embedding_A|embedding_B|A\.weight|B\.weight)")
NEUTRAL = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type",
    "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Keys that are read here, or tell only how the adapter was trained and which modules it has."""
OFF: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "megatron_core": ("megatron.core",), "ensure_weight_tying": (False, True), "qalora_group_size": (16,),
    "runtime_config": ({"ephemeral_gpu_offload": False},),
}  # fmt: skip
"""Other keys with values, besides false, null and empty ones, that leave the sum above as it is."""
WHY: Mapping[str, str] = {
    "use_dora": "DoRA rescales the columns of the sum, which is not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "init_lora_weights": "such a start changes the model's own weights, too: convert the adapter to plain "
    "LoRA when you save it (path_initial_model_for_weight_conversion)",
    "bias": "trained biases are not supported",
}
MERGED = "Merge the adapter with peft (merge_and_unload, then save_pretrained), and build the merged model"
"""The advice for adapters that are rejected."""


@dataclass(frozen=True)
class LoraDelta:
    """What is added to a matrix: scale · b · a. `a` [r, k] and `b` [n, r] are float32. `turned`: the matrix
    is an embedding, to which the transposed product is added.
    """

    a: F32
    b: F32
    scale: float
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        n, k = self.b.shape[0], self.a.shape[1]
        return (k, n) if self.turned else (n, k)

    def rows(self, start: int, stop: int) -> F32:
        """Rows [start, stop) of the sum's second part."""
        if self.turned:
            return np.asarray((self.a.T[start:stop] @ self.b.T) * np.float32(self.scale), np.float32)
        return np.asarray((self.b[start:stop] @ self.a) * np.float32(self.scale), np.float32)


@dataclass(frozen=True)
class Lora:
    """An adapter. `deltas`: by the names of its model's modules in transformers; `whole`: tensors that
    replace the model's (`modules_to_save`), as names in `files` by their names in the model. `tied`: where
    the head is the embedding, a change of the embedding also changes the head; otherwise peft leaves the
    head unchanged. `targets`: the last parts of the names of the modules that the adapter has matrices for;
    empty where adapter_config.json does not list them, or leaves out some modules of these names.
    """

    path: Path
    name: str
    base: str | None
    deltas: Mapping[str, LoraDelta]
    whole: Mapping[str, str]
    files: DirectoryCheckpoint
    tied: bool = False
    targets: tuple[str, ...] = ()

    def sha256(self) -> str:
        """SHA-256 over the adapter's two files."""
        return self.files.sha256()


def check_config(config: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError for the settings of an adapter that is not a plain LoRA. `file`: for messages."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {show(kind)}; expected LORA: nothing else is merged")
    for key, value in config.items():
        if key in NEUTRAL or not value or value in OFF.get(key, ()):
            continue
        why = WHY.get(key, "what it changes is not computed")
        raise CheckpointError(f"{file}: {key} is {show(value)}, and {why}. {MERGED}")


def open_lora(path: Path, name: str) -> Lora:
    """Open the folder of an adapter. Raises CheckpointError for missing or damaged files, other kinds of
    adapters, and tensors that do not belong to an adapted module.
    """
    config = read_json(path / ADAPTER)
    check_config(config, str(path / ADAPTER))
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(
            f"{path}: {WEIGHTS} is missing: save the adapter with save_pretrained, as safetensors"
        )
    entries = read_header(path / WEIGHTS)
    files = _Files(path, name, config, entries)
    parts: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for tensor in entries:
        plain = tensor.removeprefix(PREFIX)
        if plain == tensor:
            raise CheckpointError(f"{path / WEIGHTS}: tensor {tensor!r} does not begin with {PREFIX}")
        if found := PART.fullmatch(plain):
            parts.setdefault(found["module"], {})[found["which"].removesuffix(".weight")] = tensor
        elif "lora_" in plain:
            raise CheckpointError(f"{path / WEIGHTS}: tensor {tensor!r} is not part of a plain LoRA")
        else:
            whole[plain.replace(".modules_to_save.default.", ".").replace(".base_layer.", ".")] = tensor
    if not parts and not whole:
        raise CheckpointError(f"{path / WEIGHTS}: there are no tensors")
    deltas = {module: _delta(files, config, module, named) for module, named in parts.items()}
    base = config.get("base_model_name_or_path")
    return Lora(
        path,
        name,
        base if isinstance(base, str) and base else None,
        deltas,
        whole,
        files,
        config.get("ensure_weight_tying") is True,
        _targets(config),
    )


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """See Lora.targets."""
    listed = config.get("target_modules")
    some = bool(config.get("exclude_modules")) or config.get("layers_to_transform") is not None
    if some or not isinstance(listed, list):
        return ()
    return tuple(name for name in listed if isinstance(name, str))


class _Files(DirectoryCheckpoint):
    """The two files of an adapter: reads tensors, and hashes both."""

    config_file = ADAPTER
    lists = ()


def _delta(
    files: DirectoryCheckpoint, config: Mapping[str, Any], module: str, named: Mapping[str, str]
) -> LoraDelta:
    """The two matrices of a module, and its scale."""
    turned = any(which.startswith("embedding") for which in named)
    wanted = ("embedding_A", "embedding_B") if turned else ("A", "B")
    if set(named) != set(wanted):
        raise CheckpointError(f"{files.path / WEIGHTS}: {module} has lora_{', lora_'.join(named)} alone")
    a, b = (to_float32(files.read(named[which])) for which in wanted)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{files.path / WEIGHTS}: A {list(a.shape)} and B {list(b.shape)} of {module} do not fit together"
        )
    rank = a.shape[0]
    alpha = _of_module(files, config, "alpha_pattern", module, config.get("lora_alpha", 8))
    stated = _of_module(files, config, "rank_pattern", module, config.get("r", 8))
    if stated != rank or not isinstance(alpha, (int, float)):
        raise CheckpointError(
            f"{files.path / ADAPTER}: {module} has rank {rank} in {WEIGHTS}, and r is {show(stated)}, "
            f"lora_alpha {show(alpha)}"
        )
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") is True else rank)
    return LoraDelta(a, b, scale, turned)


def _of_module(
    files: DirectoryCheckpoint, config: Mapping[str, Any], key: str, module: str, default: object
) -> object:
    """A value that a pattern gives some modules: peft's patterns are regular expressions for the ends of
    names.
    """
    patterns = config.get(key)
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise CheckpointError(
                f"{files.path / ADAPTER}: {key} has {show(pattern)}, which is not a regular expression "
                f"({error}): correct it"
            ) from error
        if found:
            return value
    return default
