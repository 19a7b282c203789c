"""The environment of child processes: the variables that they need to run, and no keys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# fmt: off
_NAMES = frozenset((
    "PATH", "PATHEXT", "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "TERM", "COLORTERM", "NO_COLOR",
    "FORCE_COLOR", "COLUMNS", "CI", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV",
    "SYSTEMROOT", "WINDIR", "SYSTEMDRIVE", "COMSPEC", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA",
    "USERPROFILE", "HOMEDRIVE", "HOMEPATH", "NUMBER_OF_PROCESSORS", "OS",
    "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH", "SDKROOT", "DEVELOPER_DIR", "MACOSX_DEPLOYMENT_TARGET", "SOURCE_DATE_EPOCH",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
))
"""Variables of systems, shells, compilers and networks, which children get."""

_PREFIXES = (
    "LC_", "XDG_", "LD_", "DYLD_", "PROCESSOR_", "PROGRAMFILES", "COMMONPROGRAMFILES", "MALLOC_", "GLIBC_",
    "PYTHON", "CONDA_", "NIX_", "COV_", "COVERAGE_", "ASAN_", "UBSAN_", "LSAN_", "TSAN_",
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_",
    "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "ROCM_", "HSA_", "GPU_", "MTL_",
    "METAL_", "VK_", "MESA_", "LIBGL_", "GALLIUM_", "LP_", "WGPU_",
    "TORCH", "PYTORCH_", "TRITON_", "TVM_", "ZIG_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_",
    "NEARFAR_", "RAY_",
)
"""Prefixes of settings of libraries that a child may load."""
# fmt: on

_SECRET = re.compile(
    r"(^|_)(\w*KEYS?|\w*TOKENS?|\w*SECRETS?|PASS|PASSWD|PASSPHRASE|\w*PASSWORDS?|CREDENTIALS?|CREDS?|AUTH|PAT"
    r"|AUTHORIZATION|COOKIES?|DSN|HEADERS)($|_)",
    re.IGNORECASE,
)
_WITH_USER = re.compile(r"://[^/\s@]+@")


def child_environment(**more: str) -> dict[str, str]:
    """The environment for a child process, with `more` added. Every start of a process uses it
    (`tests/unit/test_children.py`).

    It lists the variables that pass, not those that do not: nobody knows what a key may be called.
    """
    return {**{name: value for name, value in os.environ.items() if _passes(name, value)}, **more}


@contextmanager
def keys_hidden() -> Iterator[None]:
    """Hide everything that looks like a key from this process's own environment while the block runs: for
    libraries that start processes by themselves, with variables of their own that nobody can list. Ray's own
    keys stay.
    """
    hidden = {
        name: value
        for name, value in os.environ.items()
        if is_key(name, value) and not name.startswith("RAY_")
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def is_key(name: str, value: str) -> bool:
    """Whether a variable looks like a key: by its name, or as an address with a user in it."""
    return bool(_SECRET.search(name) or _WITH_USER.search(value))


def _passes(name: str, value: str) -> bool:
    upper = name.upper()
    return (upper in _NAMES or upper.startswith(_PREFIXES)) and not is_key(name, value)
