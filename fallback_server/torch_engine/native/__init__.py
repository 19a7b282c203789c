"""The CPU kernel for decode rows (`decode.cpp`), compiled when the engine starts if there is a C++
compiler.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from nearfar.children import child_environment

SOURCE = Path(__file__).with_name("decode.cpp")
# Sums may be taken in any order. -ffast-math is not used: it assumes that nothing is NaN, and as a link flag
# of older GCCs it changes how the whole process treats denormal numbers.
MATH = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
FLAGS = ("-O3", "-march=native", *MATH, "-fopenmp", "-shared", "-fPIC", "-std=c++17")
COMPILE_SECONDS = 120
FIELDS = [
    "rows",
    "heads",
    "kv_heads",
    "dim",
    "value_dim",
    "page_size",
    "width",
    "window",
    "q_row",
    "q_head",
    "threads",
]

log = logging.getLogger(__name__)


class _Shape(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in FIELDS)


class NativeDecode:
    """The compiled kernel. It shares PyTorch's threads: both use the OpenMP library that PyTorch has
    loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        self._functions = {}
        for dtype, name in ((torch.float32, "nearfar_decode_f32"), (torch.bfloat16, "nearfar_decode_bf16")):
            function = getattr(library, name)
            function.argtypes = [*[pointer] * 6, ctypes.POINTER(_Shape), ctypes.c_float]
            function.restype = None
            self._functions[dtype] = function

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for this dtype."""
        return dtype in self._functions

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        scaling: float | None,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """Attend rows q [rows, heads, dim], one per sequence, to keys and values [pages, page_size, kv_heads,
        dim].

        `pages` int64 [rows, width] and `lengths` int64 [rows] (at least 1); writes out [rows, heads,
        value_dim]. All but q are contiguous.
        """
        if q.stride(2) != 1:
            q = q.contiguous()
        rows, heads, dim = q.shape
        shape = _Shape(
            rows,
            heads,
            keys.shape[2],
            dim,
            values.shape[3],
            keys.shape[1],
            pages.shape[1],
            window or 0,
            q.stride(0),
            q.stride(1),
            torch.get_num_threads(),
        )
        scale = 1 / math.sqrt(dim) if scaling is None else scaling
        tensors = (q, keys, values, pages, lengths, out)
        self._functions[q.dtype](*(tensor.data_ptr() for tensor in tensors), ctypes.byref(shape), scale)


def compile_decode() -> NativeDecode | None:
    """Compile and load the kernel. Returns None, and logs why, where that fails."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.info("there is no C++ compiler, so attention of decode rows runs in PyTorch, which is slower")
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "decode.so"
        try:
            subprocess.run(
                [*compiler.split(), *FLAGS, str(SOURCE), "-o", str(library)],
                check=True,
                capture_output=True,
                timeout=COMPILE_SECONDS,
                env=child_environment(),
            )
            return NativeDecode(ctypes.CDLL(str(library)))
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or b""
            log.warning(
                "the decode kernel cannot be compiled (%s): %s", error, detail.decode(errors="replace")[-500:]
            )
            return None
