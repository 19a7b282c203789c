"""Renders chat templates and tokenizes: messages or text in, token ids out. Runs as a child of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.labels import label_tokens
from nearfar.errors import RequestError
from nearfar.fallback_server.sandbox.child import Handler, serve
from nearfar.format.answers import AnswerFormat
from nearfar.format.conversion import record

TAIL = 64
"""Characters at the end of a rendered prompt that are sent back, to see whether it opens a reasoning section.
"""


def open_handler(settings: dict[str, Any]) -> Handler:
    """Load the tokenizer and return the job handler. Settings: directory, bos (an id or None), answers (an
    AnswerFormat as JSON).
    """
    answers = record(AnswerFormat, settings["answers"])
    codec = TextCodec.open_directory(Path(settings["directory"]), settings["bos"], answers)

    def handle(job: dict[str, Any]) -> dict[str, Any]:
        if job["op"] == "encode":
            text = job["text"]
            return {**_answer(codec.encode(text), job), **_labels(codec, text, job)}
        if job["op"] == "measure":
            return _answer(codec.encode_text(job["text"]), job)
        if job["op"] == "labels":
            return _labels(codec, codec.decode(job["tokens"]), job)
        text = codec.render_chat(
            job["messages"],
            continue_last=job["continue_last"],
            begin_answer=job["begin_answer"],
            variables=job["variables"],
        )
        try:
            made = {**_answer(codec.encode_raw(text), job), "tail": text[-TAIL:]}
        except RequestError as error:
            raise RequestError(str(error), "messages") from error
        return {**made, **_labels(codec, text, job)}

    return handle


def _labels(codec: TextCodec, text: str, job: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of the job's labels, if it has any, as the continuation of a text."""
    labels = job.get("labels")
    return {} if labels is None else {"labels": label_tokens(codec, text[-TAIL:], labels)}


def _answer(tokens: list[int], job: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens, or only their number above `most`: the server would read millions of ids only to
    reject them.
    """
    return {"tokens": tokens if len(tokens) <= job["most"] else len(tokens)}


if __name__ == "__main__":
    serve(open_handler)
