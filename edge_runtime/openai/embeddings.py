"""OpenAI's embeddings over the engine: takes texts or token ids, returns vectors of length 1."""

from __future__ import annotations

import base64
from collections.abc import Sequence as Seq
from typing import cast

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.parameters import check_model, token_prompt
from nearfar.edge_runtime.openai.records import CreateEmbeddingResponse, EmbeddingUsage, InputEmbedding
from nearfar.edge_runtime.text.beside import beside
from nearfar.errors import RequestError
from nearfar.format.requests import MAX_INPUTS

Vector = npt.NDArray[np.float32]


class Embeddings:
    """`engine.embeddings`."""

    def __init__(self, engine: LoadedModel) -> None:
        self._engine = engine

    async def create(
        self,
        input: str | Seq[str] | Seq[int] | Seq[Seq[int]],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        encoding_format: str | None = None,
        user: str | None = None,
    ) -> CreateEmbeddingResponse:
        """Compute the embedding of a text, of token ids, or of a list of either.

        `dimensions`: return the first `dimensions` values, normalized again: for models that were trained for
        it ("Matryoshka Representation Learning", 2022). `encoding_format`: "float", or "base64" of
        little-endian float32. A text gets the special tokens that the tokenizer adds; token ids are taken as
        they are.
        """
        engine = self._engine
        check_model({"model": model}, engine.manifest.model.name)
        width = engine.manifest.step.embedding
        check_dimensions(dimensions, width)
        if not isinstance(user, str | None):
            raise RequestError(f"user must be a string, not {user!r:.80}", "user")
        if encoding_format not in (None, "float", "base64"):
            raise RequestError(
                f"encoding_format must be 'float' or 'base64', not {encoding_format!r:.80}", "encoding_format"
            )
        given, encode = each(input), engine.codec.encode
        texts = await beside(
            lambda: [encode(one) if isinstance(one, str) else token_prompt(one) for one in given],
            sum(map(len, given)),
        )
        vectors = await engine.core.embed_all(texts)
        made = [
            InputEmbedding(index, written(unit(vector, dimensions), encoding_format == "base64"))
            for index, vector in enumerate(vectors)
        ]
        count = sum(map(len, texts))
        return CreateEmbeddingResponse(made, engine.manifest.model.name, EmbeddingUsage(count, count))


def each(given: object) -> list[str | Seq[int]]:
    """The inputs of a request one by one; RequestError for other types."""
    if isinstance(given, str):
        return [given]
    wrong = RequestError(
        f"input must be a text, a list of token ids, or a list of either, not {given!r:.80}", "input"
    )
    if not isinstance(given, Seq) or isinstance(given, bytes):
        raise wrong
    if not given or (len(given) > MAX_INPUTS and not isinstance(given[0], int)):
        raise RequestError(f"input must have 1 to {MAX_INPUTS} texts, it has {len(given)}", "input")
    if isinstance(given[0], int):
        return [cast(Seq[int], given)]
    if not all(isinstance(one, str | Seq) and not isinstance(one, bytes) for one in given):
        raise wrong
    return list(given)


def check_dimensions(dimensions: object, width: int | None) -> None:
    """Raise RequestError for `dimensions` outside 1…width."""
    if dimensions is None or width is None:  # the engine rejects models without embeddings
        return
    if type(dimensions) is not int or not 1 <= dimensions <= width:
        raise RequestError(f"dimensions must be from 1 to {width}, not {dimensions!r:.80}", "dimensions")


def unit(vector: Vector, dimensions: int | None = None) -> Vector:
    """The first `dimensions` values of a vector, scaled to L2 length 1; a zero vector stays zero."""
    cut = vector[:dimensions].astype(np.float64)
    return (cut / max(float(np.linalg.norm(cut)), 1e-12)).astype(np.float32)


def written(vector: Vector, as_base64: bool) -> list[float] | str:
    """A vector in JSON's form: a list of floats, or base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
