"""The process that compiles grammars: `python -m … MODEL_FOLDER VOCAB_SIZE MEMORY`, JSON lines on stdin and stdout."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

import psutil
import xgrammar
from transformers import AutoTokenizer

WHITESPACE = 24
"""Characters between two parts of a JSON text: enough to indent, too few for a weak model to lose itself in."""


def main() -> None:
    """Say what the tokenizer is, then answer {"kind", "text"} with {"compiled"} or {"error"} until stdin ends."""
    path, vocab, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    tokenizer = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(path), vocab_size=vocab)
    limit = psutil.Process().memory_info().vms + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    print(json.dumps({"tokenizer": tokenizer.serialize_json()}), file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"compiled": _compile(compiler, question["kind"], question["text"]).serialize_json()}
        except MemoryError:
            raise SystemExit(1) from None
        except Exception as error:  # xgrammar raises RuntimeError, ValueError and classes of its own for bad grammars
            answer = {"error": f"the grammar ({question['kind']}) cannot be compiled: {str(error).strip()[:500]}"}
        print(json.dumps(answer), file=out, flush=True)


def _compile(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> xgrammar.CompiledGrammar:
    match kind:
        case "json_schema":
            return compiler.compile_json_schema(text, max_whitespace_cnt=WHITESPACE)
        case "json_object":
            return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=WHITESPACE, strict_mode=False)
        case "regex":
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar(text)
        case "structural_tag":
            return compiler.compile_structural_tag(text)
    raise ValueError(f"unknown kind {kind!r}")


if __name__ == "__main__":
    main()
