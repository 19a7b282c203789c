"""Texts, small trained tokenizers of other families, and chat templates for the tokenizer parity test."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

NASTY = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces, three   spaces," + " " * 300 + "many",
    "\t\ttabs\tand\r\nCRLF\r\n\r\nand \n newlines\n\n\n",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 end",
    "combining e\u0301 a\u0308\u0323 \u1e9b\u0323 Z\u0351\u036b\u0343",
    "CJK: 你好，世界。日本語のテキスト 한국어 텍스트",
    "العربية: مرحبا بالعالم — עברית: שלום",
    "हिन्दी में पाठ, ภาษาไทย, Ελληνικά, русский",
    "digits 0123456789 3.14159 1,000,000 ²³½ Ⅷ ٣٤٥ 𝟘𝟙",
    "don't we'll I'VE they're 'tis it's",
    "controls \x00\x01\x1f\x7f\x85\xa0\u2028\u2029\u200b\u200d\ufeff end",
    "next\x85line \x85 \ufeff and\ufeffBOM \ufeff\ufeff",
    "replacement \ufffd char \ufffd\ufffd",
    "<s>",
    "</s>",
    "<|end|>",
    "<|bos|><|user|>hi<|end|><|assistant|>",
    "<s> a </s>  b <|assistant|> \n c <|user|>",
    "<|endoftext|><|im_start|>user\nhi<|im_end|>",
    "<|e <|en <|end <|end|",
    "<0x0A> <0xE2> literal byte tokens",
    "▁already ▁▁marked▁",
    "a" * 1000,
    "ab" * 700 + " " + "=-" * 300,
    "\n" * 120,
    "import os\n\ndef f(x):\n    return {'a': [1, 2, x]}  # comment\n",
    "https://example.org/a?b=c&d=%20e#f user@example.org C:\\path\\file",
    "𝒜𝓃𝒸𝒾ℯ𝓃𝓉 ﬁ ligature Å Å",
]


def real_texts(data: Path) -> list[str]:
    """Several KB of each kind of text, from its start and from its middle."""
    files = [
        data / "text/heldout.txt",
        data / "text/tinyshakespeare/input.txt",
        data / "text/tinystories-sample/tinystories.txt",
        *sorted((data / "text/classics").glob("*/*.md"))[::6],
    ]
    texts = [path.read_text(encoding="utf-8") for path in files]
    return [part for text in texts for part in (text[:3000], text[len(text) // 2 :][:3000])]


def training_text(data: Path) -> str:
    return (data / "text/heldout.txt").read_text(encoding="utf-8")[:200_000]


SPECIAL = ["<s>", "</s>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(normalizer: Any = None) -> tuple[Tokenizer, list[str]]:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizers.ByteLevel.alphabet()


def _metaspace(scheme: str) -> tuple[Tokenizer, list[str]]:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, []


def _metaspace_decoder() -> tuple[Tokenizer, list[str]]:
    tokenizer, alphabet = _metaspace("always")
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, alphabet


def _gemma_like() -> tuple[Tokenizer, list[str]]:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, []


TRAINED: dict[str, Callable[[], tuple[Tokenizer, list[str]]]] = {
    "llama3-like": _byte_level,
    "qwen-like": lambda: _byte_level(normalizers.NFC()),
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-always": lambda: _metaspace("always"),
    "metaspace-decoder": _metaspace_decoder,
    "gemma-like": _gemma_like,
}


@cache
def trained(name: str, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of a small tokenizer of that family, trained on `text`."""
    tokenizer, alphabet = TRAINED[name]()
    byte_tokens = BYTES if getattr(tokenizer.model, "byte_fallback", False) else []
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[*SPECIAL, *byte_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
        limit_alphabet=80 if not alphabet else 1000,
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    file = json.loads(tokenizer.to_str())
    # Byte tokens are pieces of the model, not special tokens, as in the published files.
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] not in byte_tokens]
    # This token is found in normalized text and takes the spaces around it.
    extra = Tokenizer.from_str(json.dumps(file))
    extra.add_tokens([AddedToken("«tool»", lstrip=True, rstrip=True, normalized=True)])
    return json.loads(extra.to_str()), {"bos_token": "<s>", "eos_token": "</s>"}


# The shapes of published models' templates, each with the part of Jinja that it needs.
TEMPLATES = {
    "chatml-with-default-system": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "headers-and-trim": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim "
        "+ '<|eot|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}"
    ),
    "strict-alternation": (
        "{%- if messages[0]['role'] == 'system' -%}\n"
        "  {%- set system = messages[0]['content'] -%}\n"
        "  {%- set turns = messages[1:] -%}\n"
        "{%- else -%}\n"
        "  {%- set system = '' -%}\n"
        "  {%- set turns = messages -%}\n"
        "{%- endif -%}\n"
        "{{ bos_token }}\n"
        "{%- for m in turns %}\n"
        "    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('roles must alternate') }}\n"
        "    {%- endif %}\n"
        "    {%- if m.role == 'user' %}\n"
        "        {{- '[INST] ' }}\n"
        "        {%- if loop.last and system %}{{ system ~ '\\n\\n' }}{% endif %}\n"
        "        {{- m.content.strip() + ' [/INST]' }}\n"
        "    {%- else %}\n"
        "        {{- ' ' + m.content + eos_token }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
    ),
    "no-system-role": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
        "supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = "
        "'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
    ),
    "namespaces-macros-tests": (
        "{%- macro turn(m) -%}<{{ m.role | upper }}>{{ m.content | tojson }}{%- endmacro -%}\n"
        "{%- set ns = namespace(users=0) -%}\n"
        "{%- for m in messages -%}\n"
        "    {%- if m.role == 'user' -%}{%- set ns.users = ns.users + 1 -%}{%- endif -%}\n"
        "    {{ turn(m) }}\n"
        "{%- endfor %}\n"
        "{{ ns.users }}{{ ' tools' if tools is defined and tools else ' none' }}\n"
        "    {% if add_generation_prompt is defined and add_generation_prompt %}\n"
        "<ASSISTANT>\n"
        "    {% endif %}\n"
    ),
}


_LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyzABC TOKtok.,!?$'\"0123456789²Ⅷ½éÉ\n▁-_"))
_ADDED = [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
_BEHAVIOURS = ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous")


def _unigram(fallback: bool) -> Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("ab", -4.5), ("the", -3.9), ("▁a", -3.2)]
    pieces += [(char, -4 - at / 100) for at, char in enumerate(_LETTERS)]
    pieces += [(token, -10.0) for token in BYTES] if fallback else []
    return Tokenizer(models.Unigram(pieces, 0, fallback))


def _bpe(fallback: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(BYTES if fallback else ()), *_LETTERS, "ab", "th", "the", "▁a"]
    merges = [("a", "b"), ("t", "h"), ("th", "e"), ("▁", "a")]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))


_PRE_TOKENIZERS = {
    "none": None,
    **{
        f"metaspace {scheme}": pre_tokenizers.Metaspace(prepend_scheme=scheme)
        for scheme in ("always", "never")
    },
    "metaspace in one": pre_tokenizers.Metaspace(split=False),
    "whitespace": pre_tokenizers.Whitespace(),
    "whitespace split": pre_tokenizers.WhitespaceSplit(),
    "bert": pre_tokenizers.BertPreTokenizer(),
    "digits": pre_tokenizers.Digits(),
    "each digit": pre_tokenizers.Digits(individual_digits=True),
    **{f"punctuation {how}": pre_tokenizers.Punctuation(how) for how in _BEHAVIOURS},
    **{
        f"split {how} {invert} {pattern}": pre_tokenizers.Split(
            Regex(r"\s+|\d") if pattern == "regex" else pattern, how, invert=invert
        )
        for how in _BEHAVIOURS
        for invert in (False, True)
        for pattern in ("a", "regex")
    },
    "sequence": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(True)]
    ),
}
_NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKD": normalizers.NFKD(),
    "lowercase": normalizers.Lowercase(),
    "strip": normalizers.Strip(),
    "strip left": normalizers.Strip(right=False),
    "accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "prepend": normalizers.Prepend("▁"),
    "dollars": normalizers.Replace("a", "$&$1"),
    "llama": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
_MORE_TOKENS = {
    "single words": [
        AddedToken("TOK", single_word=True),
        AddedToken("tok", single_word=True, normalized=False),
    ],
    "lstrip": [AddedToken("TOK", lstrip=True)],
    "rstrip": [AddedToken("TOK", rstrip=True, normalized=False)],
    "both": [AddedToken("TOK", lstrip=True, rstrip=True), AddedToken("TO", normalized=True)],
    "overlapping": [
        AddedToken("TO", normalized=True),
        AddedToken("TOKEN", normalized=False),
        AddedToken("é", normalized=True),
    ],
}


def made_up() -> dict[str, Tokenizer]:
    """Small tokenizers with every step that the web engine supports, by name."""
    made: dict[str, Tokenizer] = {}
    for model, new in (("unigram", _unigram), ("bpe", _bpe)):
        for name, step in _PRE_TOKENIZERS.items():
            made[f"{model}, {name}"] = one = new(True)
            if step is not None:
                one.pre_tokenizer = step
        for name, step in _NORMALIZERS.items():
            made[f"{model}, {name}"] = one = new(name != "lowercase")
            one.normalizer, one.pre_tokenizer = step, pre_tokenizers.Metaspace()
        for name, tokens in _MORE_TOKENS.items():
            made[f"{model}, {name}"] = one = new(False)
            one.normalizer, one.pre_tokenizer = (
                normalizers.NFC(),
                pre_tokenizers.Metaspace(prepend_scheme="first"),
            )
            one.add_tokens(tokens)
    for one in made.values():
        one.add_tokens(_ADDED)
        one.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return made


AWKWARD = [
    *(*NASTY[3:6], *NASTY[7:9], *NASTY[11:22]),
    *("🍣", "a 寿司", "寿 司 寿司", "wordTOK", "TOK", "a TOK b", "TOK TOK", "TOKEN tok toks"),
    *("x\u0085TOK\ufeffTOK \u2003 tok", "Σας ΑΣ", "éTOKé", "ab\u0301 the $& a$b", "TOK.tok,TOKTOK"),
    *("  TOK  ", "a.b!!c", "'TOK'", "<s>TOK a", "İSTANBUL ǅ", "3 ab 12 a  a"),
]
