"""Fixtures of the backend suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from nearfar.cli.build import without
from nearfar.edge_runtime import Engine
from tests.support.artifacts import Built
from tests.support.backends import BACKENDS, Lab, Transformers, transformers_of

# TVM imports PyTorch where it is installed: 2 CPU seconds for each process that collects these tests.
with without("torch"), contextlib.suppress(ImportError):
    import tvm  # noqa: F401


@pytest.fixture(scope="session")
def lab(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(built, tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def stories(lab: Lab, backend: str) -> Engine:
    return lab.engine("stories", backend)


@pytest.fixture(scope="session")
def classics(lab: Lab, backend: str) -> Engine:
    return lab.engine("q4", backend)


@pytest.fixture(scope="session")
def stories_reference() -> Transformers:
    return transformers_of("stories")


@pytest.fixture(scope="session")
def classics_reference() -> Transformers:
    return transformers_of("q4")
