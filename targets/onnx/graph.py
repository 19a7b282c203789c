"""An ONNX graph under construction: nodes, constants, and tensors whose bytes are in files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from nearfar.targets.onnx.external import Placed

OPSET = 21
"""The opset that browsers' ONNX Runtime and onnxruntime-genai read; nothing newer is needed."""
IR_VERSION = 10
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "uint8": TensorProto.UINT8,
}
Extents = Sequence[int | str]


class Graph:
    """Collects nodes in order. A value is the name of a node's output, an input or a tensor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}

    def node(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output; returns its value."""
        (out,) = self.nodes(op, 1, *inputs, domain=domain, **attributes)
        return out

    def nodes(self, op: str, count: int, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node with `count` outputs; returns their values."""
        name = f"{op}.{len(self._nodes)}"
        outputs = [name if count == 1 else f"{name}.{index}" for index in range(count)]
        self._nodes.append(helper.make_node(op, inputs, outputs, name, domain=domain, **attributes))
        return outputs

    def constant(self, values: npt.ArrayLike, dtype: str) -> str:
        """Add a small constant to the graph, or reuse one with the same content."""
        array = np.asarray(values, dtype)
        name = f"const.{dtype}.{list(array.shape)}.{array.tobytes().hex()}"
        if name not in self._tensors:
            self._tensors[name] = numpy_helper.from_array(array, name)
        return name

    def external(self, name: str, placed: Placed) -> str:
        """Add a tensor whose bytes are in a file."""
        if name not in self._tensors:
            tensor = TensorProto(name=name, data_type=DTYPES[placed.dtype], dims=placed.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, entry in (
                ("location", placed.file),
                ("offset", str(placed.offset)),
                ("length", str(placed.bytes)),
            ):
                tensor.external_data.add(key=key, value=entry)
            self._tensors[name] = tensor
        return name

    def input(self, name: str, dtype: str, shape: Extents, default: npt.ArrayLike | None = None) -> str:
        """Add an input; callers may omit it if it has a `default`."""
        self._inputs.append(helper.make_tensor_value_info(name, DTYPES[dtype], list(shape)))
        if default is not None:
            self._tensors[name] = numpy_helper.from_array(np.asarray(default, dtype), name)
        return name

    def output(self, value: str, name: str, shape: Extents) -> None:
        """Make a float32 value an output of the graph, named `name`."""
        self._nodes.append(helper.make_node("Identity", [value], [name], f"out.{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def save(self, file: Path) -> None:
        """Write the graph beside its tensor files, and check it with onnx."""
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, list(self._tensors.values())
        )
        domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(
            graph, opset_imports=domains, ir_version=IR_VERSION, producer_name="nearfar"
        )
        file.write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(file), full_check=False)
