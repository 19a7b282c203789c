"""The input of the functions that convert an architecture's own keys, and what several of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar.build.weights.gguf.header import GgufTensor
from nearfar.step.config import MAX_CONTEXT, MAX_LAYERS, ConfigReader
from nearfar.step.experts import MAX_EXPERTS

Config = dict[str, Any]
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Facts:
    """Input of the functions that read an architecture's own keys: keys, tensors, the config so far."""

    read: ConfigReader
    tensors: Mapping[str, GgufTensor]
    config: Config

    def factors(self, name: str) -> list[float] | None:
        """Read a tensor of divisors of frequencies; None where the file has no such tensor."""
        if name not in self.tensors:
            return None
        tensor = self.tensors[name]
        entry = tensor.entry
        if tensor.type.dtype is None or len(tensor.shape) != 1 or tensor.shape[0] > self.config["head_dim"]:
            raise self.read.error(
                f"tensor {name!r} is {tensor.type.name} {list(tensor.shape)}; expected floats"
            )
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            return [float(value) for value in np.frombuffer(stream.read(entry.bytes), entry.dtype)]

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether a layer has a tensor."""
        return f"blk.{layer}.{tensor}" in self.tensors

    def experts(self, key: str, inner: str = "") -> None:
        """Read how many experts there are into the config's `key`, how many a token has, and their width
        into `inner`; without that key their width is that of an MLP.
        """
        read, config = self.read, self.config
        config[key] = read.size("expert_count", most=MAX_EXPERTS)
        config["num_experts_per_tok"] = read.size("expert_used_count", most=config[key])
        width = config["intermediate_size"]
        if inner:
            config[inner] = read.size("expert_feed_forward_length", width)
        elif read.size("expert_feed_forward_length", width) != width:
            read.refuse("expert_feed_forward_length", f"{width:,}, as feed_forward_length is")

    def window(self) -> None:
        """Read the window into the config; a required key."""
        self.config["sliding_window"] = self.read.size(WINDOW, most=MAX_CONTEXT)

    def layer_types(self, default: int) -> list[str]:
        """The type of each layer by the pattern of windows: true or false for each layer, or a number n for
        every n-th layer without a window. `default`: the n of a file that has no pattern.
        """
        layers = self.config["num_hidden_layers"]
        given = self.read.config.get(PATTERN)
        if isinstance(given, bool):  # the same for every layer
            self.read.given(PATTERN)
            windowed = [given] * layers
        elif isinstance(given, list):
            self.read.given(PATTERN)
            if len(given) != layers or not all(isinstance(item, bool) for item in given):
                self.read.refuse(PATTERN, f"true or false for each of {layers} layers")
            windowed = given
        else:
            pattern = self.read.size(PATTERN, default, most=MAX_LAYERS)
            windowed = [(i + 1) % pattern != 0 for i in range(layers)]
        return ["sliding_attention" if each else "full_attention" for each in windowed]
