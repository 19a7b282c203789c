"""Checkpoints of published shapes with random weights, so that speed can be measured without a download.

A shape is a file in shapes/: the model's config.json, and where its values were read. The tensors follow from
the list of the step (nearfar.step).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nearfar import strict_json
from nearfar.build.output import output_directory
from nearfar.build.weights.safetensors import SafetensorsWriter, TensorSpec
from nearfar.errors import BuildError
from nearfar.processors import processors
from nearfar.step.model import Model
from nearfar.step.ops import Conv
from nearfar.step.params import Param
from nearfar.step.reading import read_model

SHAPES = Path(__file__).parent / "shapes"
STD = 0.02  # standard deviation of the weights if the config has no initializer_range
FILE_BYTES = 1_000_000_000
CHUNK = 1 << 20  # weights drawn at a time; another value gives other weights for a seed
BEFORE = 8  # chunks drawn ahead of the writer
MARK = "nearfar_synth"  # the key in config.json that marks a directory made by this module

Progress = Callable[[int, int], None]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class SynthTensor:
    """A tensor to be written. `value`: the value of all its elements; None: they are drawn from normal(0,
    std).
    """

    shape: tuple[int, ...]
    value: float | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ConfigShape:
    """A config.json. `model`, `source`: the model that it belongs to, and where its values were read."""

    config: Mapping[str, Any]
    model: str = ""
    source: str = ""

    @cached_property
    def built(self) -> Model:
        """The model that a build reads from the config."""
        return read_model(dict(self.config)).model

    @property
    def tensors(self) -> dict[str, SynthTensor]:
        """The tensors of a checkpoint, in the order of the step. Norms are 1 as the step reads them, biases
        are 0; the taps of a convolution are [columns, 1, taps].
        """
        taps = {op.weight: op.taps for op in self.built.step.ops if isinstance(op, Conv)}

        def whole(param: Param, shape: tuple[int, ...]) -> tuple[int, ...]:
            count = taps.get(param.name)
            return shape if count is None else (shape[0] // count, 1, count)

        return {
            name: SynthTensor(
                whole(param, shape),
                None if param.is_matrix else float(not name.endswith(".bias")) - param.offset,
            )
            for param in self.built.step.params
            for name, shape in param.expected().items()
        }

    @property
    def special(self) -> dict[int, str]:
        """Special tokens by their ids. The token that ends a turn is an end token, the one that begins a turn
        is the beginning of the text.
        """
        begin, ends = self.built.bos_token_id, self.built.eos_token_ids
        end = ends[-1] if ends else self.built.vocab_size - 1
        turn = begin if begin is not None and begin != end else (end or self.built.vocab_size) - 1
        return {turn: "<|turn|>", end: "<|end|>"}


def shape_names() -> list[str]:
    """The names of the published shapes that `synth_checkpoint` knows."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def published(name: str) -> ConfigShape:
    """Read a published shape. Raises BuildError for an unknown name."""
    if name not in shape_names():
        raise BuildError(f"unknown shape {name!r}: use one of {', '.join(shape_names())}")
    return ConfigShape(**strict_json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8")))


def synth_checkpoint(
    name: str, output: Path, seed: int = 0, progress: Progress = lambda done, total: None
) -> None:
    """Write the checkpoint of a published shape; `progress` gets (bytes written, bytes in all) of the
    weights.

    Raises BuildError for an unknown shape, an output that is not ours to replace, or a full disk.
    """
    write_checkpoint(published(name), output, seed, progress)


def write_checkpoint(
    shape: ConfigShape,
    output: Path,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write config, tokenizer and bfloat16 weights of a shape; memory holds a few chunks."""
    with output_directory(output, replaceable=_is_ours) as directory:
        write_small_files(shape, directory, seed)
        _write_weights(directory, shape, seed, progress, file_bytes)


def write_small_files(shape: ConfigShape, directory: Path, seed: int = 0) -> None:
    """Write the files of a shape's checkpoint except the weights: config and tokenizer."""
    _write_json(directory / "config.json", {**shape.config, MARK: {"seed": seed}})
    ids = {key: shape.config.get(key) for key in ("bos_token_id", "eos_token_id")}
    _write_json(directory / "generation_config.json", {**ids, "do_sample": False})
    _write_tokenizer(directory, shape)


def _write_weights(
    directory: Path, shape: ConfigShape, seed: int, progress: Progress, file_bytes: int
) -> None:
    """Write the safetensors files, and their index where there are several."""
    tensors, std = shape.tensors, shape.config.get("initializer_range", STD)
    specs = [TensorSpec(name, "bfloat16", tensor.shape) for name, tensor in tensors.items()]
    total, done = sum(spec.bytes for spec in specs), 0
    with (
        ThreadPoolExecutor(min(4, processors())) as pool,
        SafetensorsWriter(directory, specs, file_bytes, {"format": "pt"}) as writer,
    ):
        for number, (name, tensor) in enumerate(tensors.items()):
            for chunk in _values(pool, tensor, std, (seed, number)):
                writer.write(name, chunk)
                done += chunk.nbytes
                progress(done, total)
        writer.finish()


def _values(
    pool: ThreadPoolExecutor, tensor: SynthTensor, std: float, key: tuple[int, int]
) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's bfloat16 values in chunks, which depend on the key and the chunk's number alone."""
    if tensor.value is not None:
        yield np.full(tensor.shape, tensor.value, ml_dtypes.bfloat16)
        return
    chunks = [
        (key, index, min(CHUNK, tensor.size - index * CHUNK), std)
        for index in range(-(-tensor.size // CHUNK))
    ]
    for first in range(0, len(chunks), BEFORE):
        yield from pool.map(_draw, chunks[first : first + BEFORE])


def _draw(job: tuple[tuple[int, int], int, int, float]) -> npt.NDArray[Any]:
    """Draw one chunk of normal(0, std) as bfloat16 (the value rounded half up at the 16th bit)."""
    key, index, count, std = job
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence((*key, index))))
    bits = (random.standard_normal(count, np.float32) * np.float32(std)).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def _write_tokenizer(directory: Path, shape: ConfigShape) -> None:
    """Write a byte-level tokenizer in which every id below vocab_size decodes: special tokens, 256 bytes,
    filler words.
    """
    special, begin = shape.special, shape.built.bos_token_id
    if begin is not None:
        special.setdefault(begin, "<|begin|>")
    plain = iter(_words(sorted(pre_tokenizers.ByteLevel.alphabet())))
    vocab = {
        special[index] if index in special else next(plain): index for index in range(shape.built.vocab_size)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special[index] for index in sorted(special)])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **({"bos_token": special[begin]} if begin is not None else {}),
            "eos_token": "<|end|>",
            "model_max_length": shape.built.context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _words(alphabet: list[str]) -> Iterator[str]:
    """Yield the byte characters, then made-up words with a leading space (Ġbababa, Ġbebaba) without end."""
    yield from alphabet
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    base = len(syllables)
    number = base
    while True:
        word, rest = "", number
        while rest:
            word, rest = syllables[rest % base] + word, rest // base
        yield "\u0120" + word
        number += 1


def _is_ours(path: Path) -> bool:
    """Whether an earlier run wrote this directory: its config.json has the key MARK."""
    try:
        return MARK in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
