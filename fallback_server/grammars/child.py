"""The process that compiles grammars for a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import RequestError
from nearfar.fallback_server.grammars.compiled import compiler, vocabulary
from nearfar.fallback_server.sandbox.child import Handler, serve
from nearfar.format.answers import AnswerFormat
from nearfar.format.conversion import record


def open_handler(settings: dict[str, Any]) -> Handler:
    """Load the vocabulary and return the compiler of grammars. Settings: directory, vocab_size, eos (ids),
    answers (an AnswerFormat as JSON, or None), compiled_bytes (the largest compiled grammar in bytes).
    """
    answers = settings["answers"] and record(AnswerFormat, settings["answers"])
    compile_grammar = compiler(
        vocabulary(Path(settings["directory"]), settings["vocab_size"], settings["eos"], answers)
    )

    def handle(job: dict[str, Any]) -> dict[str, Any]:
        compiled = compile_grammar(Grammar(job["kind"], job["text"])).serialize_json()
        if len(compiled) > settings["compiled_bytes"]:
            raise RequestError(
                f"the grammar compiles to {len(compiled):,} bytes, more than the "
                f"{settings['compiled_bytes']:,} allowed; make it smaller",
                "response_format",
            )
        return {"compiled": compiled}

    return handle


if __name__ == "__main__":
    serve(open_handler)
