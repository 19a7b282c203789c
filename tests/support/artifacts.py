"""Artifacts that are built once a test session by the real command, and transformers' answers with the same
weights.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from nearfar.build.targets import target_names
from nearfar.kernels.buckets import Buckets
from tests.shared_data import shared_data

BUCKETS = dict.fromkeys((("classics-7M", "q4"), ("stories260K", "none")))
FEW = Buckets((1, 16))
"""Sizes of steps by model and quantization: None for all sizes that suit a target, or the sizes that all
targets have; other models get a few. Compiling the kernels of one size takes 2 CPU seconds for the CPU, and
one for any other target.
"""
_FEWER = (
    "from functools import partial\n"
    "from nearfar.cli import app, build\n"
    "from nearfar.kernels.buckets import Buckets\n"
    "build.BuildOptions = partial(build.BuildOptions, buckets={})\n"
    "app()\n"
)


def build_command(buckets: Buckets | None = None) -> list[str]:
    """The command that runs `nearfar build` in a process of its own. `buckets`: sizes of steps, for which the
    command line has no option.
    """
    if buckets is None:
        return [sys.executable, "-m", "nearfar", "build"]
    return [sys.executable, "-c", _FEWER.format(buckets), "build"]


class Built:
    """Builds checkpoints of the shared data at first use; OUT holds a sub-folder for each target.

    Processes that share the folder build once and wait for each other.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, model: str, quant: str, *targets: str) -> Path:
        """The artifacts of a model of the shared data; see `of`."""
        return self.of(shared_data("models", model), quant, *targets)

    def of(self, checkpoint: Path, quant: str, *targets: str) -> Path:
        """The artifacts of any checkpoint, which is identified by its folder's name. At least the named
        targets are built; without names, all targets.
        """
        out = self._root / f"{checkpoint.name}-{quant}"
        with FileLock(f"{out}.lock"):
            lacking = [name for name in targets or target_names() if not (out / name).exists()]
            if lacking:
                command = [
                    *build_command(BUCKETS.get((checkpoint.name, quant), FEW)),
                    str(checkpoint),
                    "--quant",
                    quant,
                    "-o",
                    str(out),
                    "--device-class",
                    "software",
                    "--cpu-features",
                    "native",
                ]
                done = subprocess.run(
                    [*command, "--target", ",".join(lacking)],
                    capture_output=True,
                    text=True,
                    timeout=900,
                )
                assert done.returncode == 0, done.stderr
        return out


class Reference:
    """transformers in float32, on the weights that the quantized checkpoint represents."""

    def __init__(self, model: str, quant: str) -> None:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        checkpoint = shared_data("models", model)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()
        self._torch = torch
        if quant != "none":
            self._dequantize(quant)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The next `count` greedy tokens."""
        tokens = self._torch.tensor([ids])
        out = self.model.generate(tokens, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return list(out[0, len(ids) :].tolist())

    def continuation(self, ids: list[int], count: int) -> str:
        """The text that the next `count` greedy tokens add to the text of `ids`; the end token is not
        text.
        """
        new = self.greedy(ids, count)
        before, whole = (self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids + new))
        return str(whole)[len(before) :]

    def _dequantize(self, quant: str) -> None:
        from nearfar.build.weights.quantize import Scheme, dequantize, quantize

        scheme = Scheme.parse(quant)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 2 and scheme.fits(parameter.shape[1]):
                weights = quantize(parameter.detach().numpy(), scheme, name)
                parameter.data = self._torch.from_numpy(dequantize(weights, scheme.group_size))


@cache
def reference(model: str, quant: str) -> Reference:
    """One Reference for each model and quantization."""
    return Reference(model, quant)
