"""The text that a quantization is calibrated with, as windows of tokens."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nearfar.build.options import BuildOptions
from nearfar.build.source import Source
from nearfar.build.weights.container import Checkpoint
from nearfar.edge_runtime.text.tokenizer import tokenizer_of
from nearfar.errors import BuildError
from nearfar.step.model import Model

SHIPPED = Path(__file__).with_name("text.txt")
LENGTH = 512
"""Tokens of a window; fewer where the model's context is shorter."""
MOST_WINDOWS = 128
LEAST_TOKENS = 4096


@dataclass(frozen=True)
class CalibrationText:
    """A calibration text as tokens, `windows` int64 [windows, length], with the `name` and `sha256` of the
    text for the manifest.
    """

    windows: npt.NDArray[np.int64]
    name: str
    sha256: str

    @property
    def description(self) -> str:
        """The text's name and SHA-256, as the manifest has them."""
        return f"{self.windows.size:,} tokens of {self.name} (sha256 {self.sha256[:16]})"

    def part(self, most: int) -> CalibrationText:
        """A text of at most `most` windows, taken evenly from all of this one."""
        count = min(most, len(self.windows))
        return replace(self, windows=self.windows[np.linspace(0, len(self.windows) - 1, count).astype(int)])


def calibration_text(options: BuildOptions, source: Source) -> Callable[[], CalibrationText]:
    """A function that gives the build's calibration text; the text is read at the first call only."""
    return functools.cache(lambda: read_text(options.calibrate, source.checkpoint, source.model))


def read_text(file: Path | None, checkpoint: Checkpoint, model: Model) -> CalibrationText:
    """Read the shipped text, or a UTF-8 file, as windows of tokens taken evenly from all of it; each begins
    with the beginning-of-text token where the tokenizer adds one. Raises BuildError for an unusable text.
    """
    path = file or SHIPPED
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise BuildError(f"--calibrate {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BuildError(f"--calibrate {path}: is not UTF-8 (byte {error.start})") from error
    tokenizer = tokenizer_of(checkpoint.tokenizer_json)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    begins = tokenizer.encode("").ids[:1] == [model.bos_token_id]
    length = min(LENGTH, model.context_length)
    inside = length - begins
    count = min(MOST_WINDOWS, len(ids) // inside)
    if count * length < min(LEAST_TOKENS, MOST_WINDOWS * length):
        raise BuildError(
            f"--calibrate {path}: has {len(ids):,} tokens of this model, at least {LEAST_TOKENS:,} are "
            "needed: give a longer text, or leave --calibrate out for the one that comes with nearfar"
        )
    starts = np.linspace(0, len(ids) - inside, count).astype(np.int64)
    windows = np.stack([ids[start : start + inside] for start in starts])
    if begins:
        windows = np.concatenate([np.full((count, 1), model.bos_token_id), windows], axis=1)
    if windows.max(initial=0) >= model.vocab_size:
        raise BuildError(
            f"--calibrate {path}: the tokenizer gives token {windows.max()}, which the model lacks"
        )
    name = "the shipped text" if file is None else path.name
    return CalibrationText(windows, name, hashlib.sha256(data).hexdigest())
