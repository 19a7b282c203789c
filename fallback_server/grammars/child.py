"""The process that shows what compiling a grammar takes, before the process that samples compiles it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import RequestError
from nearfar.fallback_server.grammars.compiled import open_compiler
from nearfar.fallback_server.sandbox.child import Handler, serve
from nearfar.format.answers import AnswerFormat
from nearfar.format.manifest import record


def open_handler(settings: dict[str, Any]) -> Handler:
    """Load the vocabulary. Settings: directory, vocab_size, eos (ids), answers (an AnswerFormat as JSON, or
    None), compiled_bytes (the most that a compiled grammar may hold).
    """
    answers = settings["answers"] and record(AnswerFormat, settings["answers"])
    compile_grammar = open_compiler(
        Path(settings["directory"]), settings["vocab_size"], settings["eos"], answers
    )

    def handle(job: dict[str, Any]) -> dict[str, Any]:
        grammar = Grammar(job["kind"], job["text"])
        size = compile_grammar(grammar).memory_size_bytes
        if size > settings["compiled_bytes"]:
            raise RequestError(
                f"the grammar compiles to {size:,} bytes, more than the "
                f"{settings['compiled_bytes']:,} allowed; make it smaller",
                grammar.param,
            )
        return {"bytes": size}

    return handle


if __name__ == "__main__":
    serve(open_handler)
