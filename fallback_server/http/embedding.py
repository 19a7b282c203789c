"""Embeddings in OpenAI's shape: what is asked, as an engine's request, and the vectors, as a response."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar.edge_runtime.openai.embeddings import Vector, check_dimensions, unit
from nearfar.errors import EngineError
from nearfar.fallback_server.engines.base import Embeddings, EngineRequest
from nearfar.fallback_server.http import convert
from nearfar.fallback_server.http.schemas import EmbeddingRequest
from nearfar.fallback_server.http.shapes import embeddings

NOT_FINITE = "a vector has values that are no numbers: the model overflows, run it in a wider dtype (float32)"


def embedding(body: EmbeddingRequest) -> EngineRequest:
    """Vectors of one or several texts; they have no answers, so they cost their inputs."""
    name = f"embd-{secrets.token_hex(12)}"
    return EngineRequest(
        name, body.model, prompts=convert.prompts(body.input), max_tokens=0, pooling=body.pooling
    )


@dataclass(frozen=True)
class EmbeddingShape:
    """How vectors are written, as engines give them: here it is seen that they are numbers, and they get
    length 1, as OpenAI's have.

    `dimensions`: so many values, the first ones, of length 1 again. `normalize`: an upstream's vectors stay
    as they are. base64 is that of little-endian float32.
    """

    model: str
    as_base64: bool = False
    dimensions: int | None = None
    normalize: bool = True

    def whole(self, found: Embeddings) -> dict[str, Any]:
        """All vectors, as a record that `written` reads: it raises EngineError at one that is no numbers."""
        if found.vectors:
            check_dimensions(self.dimensions, len(found.vectors[0]))
        return embeddings(self.model, map(self._value, found.vectors), found.tokens)

    def _value(self, vector: Vector) -> Vector | str:
        if not np.isfinite(vector).all():
            raise EngineError(NOT_FINITE)
        made = unit(vector, self.dimensions) if self.normalize or self.dimensions is not None else vector
        return base64.b64encode(made.astype("<f4").tobytes()).decode() if self.as_base64 else made
