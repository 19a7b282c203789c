"""Embeddings in OpenAI's shape: converts the request for the engine, and the vectors to a response."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar.edge_runtime.openai.embeddings import Vector, check_dimensions, unit
from nearfar.errors import EngineError
from nearfar.fallback_server.engines.base import EmbeddingVectors, EngineRequest
from nearfar.fallback_server.http import convert
from nearfar.fallback_server.http.schemas import EmbeddingRequest
from nearfar.fallback_server.http.shapes import embeddings

NOT_FINITE = "a vector has a value that is NaN or infinite: run the model in a wider dtype (float32)"


def embedding(body: EmbeddingRequest) -> EngineRequest:
    """Convert a request for vectors of one or several texts. There is no answer, so it costs its inputs
    only.
    """
    name = f"embd-{secrets.token_hex(12)}"
    return EngineRequest(
        name, body.model or "", prompts=convert.prompts(body.input), max_tokens=0, pooling=body.pooling
    )


@dataclass(frozen=True)
class EmbeddingShape:
    """The response shape of vectors. It checks that they are finite and scales them to length 1, like
    OpenAI's.

    `dimensions`: keep this many first values, scaled to length 1 again. `normalize` False leaves an
    upstream's vectors as they are. base64 encodes little-endian float32.
    """

    model: str
    as_base64: bool = False
    dimensions: int | None = None
    normalize: bool = True

    def whole(self, found: EmbeddingVectors) -> dict[str, Any]:
        """Return all vectors as a record for `written`, which raises EngineError at a vector that is not
        finite.
        """
        if found.vectors:
            check_dimensions(self.dimensions, len(found.vectors[0]))
        return embeddings(self.model, map(self._value, found.vectors), found.tokens)

    def _value(self, vector: Vector) -> Vector | str:
        if not np.isfinite(vector).all():
            raise EngineError(NOT_FINITE)
        made = unit(vector, self.dimensions) if self.normalize or self.dimensions is not None else vector
        return base64.b64encode(made.astype("<f4").tobytes()).decode() if self.as_base64 else made
