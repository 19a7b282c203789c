"""Embeddings in OpenAI's shape: what is asked, as an engine's request, and the vectors, as a response."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar.edge_runtime.openai.embeddings import check_dimensions, unit
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
        name, body.model or "", prompts=convert.prompts(body.input), max_tokens=0, pooling=body.pooling
    )


@dataclass(frozen=True)
class EmbeddingShape:
    """How vectors are written. `dimensions`: so many values, the first ones, of length 1 again. `normalize`:
    all vectors get length 1, as OpenAI's have; an upstream's stay as they are. base64 is that of
    little-endian float32.
    """

    model: str
    as_base64: bool = False
    dimensions: int | None = None
    normalize: bool = True

    def whole(self, found: Embeddings) -> dict[str, Any]:
        """All vectors."""
        vectors = [np.asarray(vector, "<f4") for vector in found.vectors]
        if not all(np.isfinite(vector).all() for vector in vectors):
            raise EngineError(NOT_FINITE)
        width = len(vectors[0]) if vectors else 0
        if vectors:
            check_dimensions(self.dimensions, width)
        if self.normalize or self.dimensions is not None:
            vectors = [unit(vector, self.dimensions) for vector in vectors]
        if self.as_base64:
            encoded = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
            return embeddings(self.model, encoded, found.tokens)
        return embeddings(self.model, [vector.tolist() for vector in vectors], found.tokens)
