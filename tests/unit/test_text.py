"""Text in and out: detokenizer, stop strings, templates, raw prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nearfar.edge_runtime.text.codec import _BYTES, TextCodec
from nearfar.edge_runtime.text.stream import Detokenizer, StopMatcher, TextStream
from nearfar.errors import RequestError
from tests.shared_data import shared_data
from tests.support import tiny

TEXTS = [
    "Once upon a time, there was a café — naïve, 10 €.",
    "日本語のテキスト、そして中文。",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 and 🇩🇪",
    "a\u0301 combining, \t tabs\n\n\nlines   spaces  ",
    "Ω≈ç√∫˜µ≤≥÷ \U0001f600\U0001f601\U0001f602",
]


CHARACTERS = {byte: char for char, byte in _BYTES.items()}
"""By byte, how byte-level tokenizers write it."""


def tiny_codec() -> TextCodec:
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}}
    return TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256)


@pytest.fixture(params=["tiny", "stories260K", "classics-7M", "phi3-bpe-32k", "smollm-bytelevel-bpe-49k"])
def codec(request: pytest.FixtureRequest) -> TextCodec:
    if request.param == "tiny":
        return tiny_codec()
    folder = "models" if "-" not in request.param or request.param == "classics-7M" else "tokenizers"
    return TextCodec(
        Tokenizer.from_file(str(shared_data(folder, request.param, "tokenizer.json"))), {}, None, 1
    )


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_whole_and_are_whole_characters(codec: TextCodec, text: str) -> None:
    tokens = codec.tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == codec.decode(tokens)


def test_long_texts_decode_the_same_in_pieces(codec: TextCodec) -> None:
    rng = random.Random(1)
    text = " ".join(rng.choice(TEXTS) for _ in range(40))
    tokens = codec.tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(codec)
    assert "".join(map(detokenizer.push, tokens)) + detokenizer.finish() == codec.decode(tokens)


def test_text_continues_its_prompt(codec: TextCodec) -> None:
    tokens = codec.tokenizer.encode("Hello there my friend", add_special_tokens=False).ids
    for cut in range(1, len(tokens)):
        detokenizer = Detokenizer(codec, tokens[:cut])
        out = "".join(map(detokenizer.push, tokens[cut:])) + detokenizer.finish()
        assert codec.decode(tokens[:cut]) + out == codec.decode(tokens)


def test_half_a_character_at_the_end_is_not_lost() -> None:
    codec = tiny_codec()
    tokens = codec.tokenizer.encode("ab😀").ids[:-1]
    detokenizer = Detokenizer(codec)
    assert "".join(map(detokenizer.push, tokens)) == "ab"
    assert detokenizer.finish() == "\ufffd"


def test_byte_tokens_that_make_no_character_do_not_hold_text_back_for_ever() -> None:
    codec = tiny_codec()
    detokenizer = Detokenizer(codec)
    broken = codec.tokenizer.encode("é").ids[:1] * 3
    out = "".join(map(detokenizer.push, [*broken, *codec.tokenizer.encode("ok").ids]))
    assert out.endswith("ok")


class CountingCodec(TextCodec):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, tokens: Seq[int]) -> str:
        self.decoded += len(tokens)
        return super().decode(tokens)


def byte_fallback() -> Tokenizer:
    """A token a byte as Llama's tokenizers write them, with words that begin with a space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁ok": 257, "a": 258}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return made


def crossing() -> Tokenizer:
    """Tokens that end one character and begin the next: no push ends where a character does."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("éé")[0][0]
    vocab = {char: index for index, char in enumerate(sorted(alphabet))} | {text[1] + text[2]: 256}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[(text[1], text[2])]))
    made.decoder = decoders.ByteLevel()
    return made


FALLBACK: dict[str, list[int]] = {
    "an invalid byte": [0xFF],
    "continuation bytes": [0x80],
    "beginnings": [0xF0, 0x9F],
    "a special token": [259],
    "a special token in a character": [0xF0, 259],
    "spaces": [256],
    "emoji": list("😀".encode()),
    "chinese": list("你".encode()),
    "words": [257, 258],
    "bad then good": [0xFF, *"你".encode()],
}


@pytest.mark.parametrize("loop", FALLBACK)
def test_the_work_grows_with_the_tokens_whatever_they_are(loop: str) -> None:
    """A model that repeats bytes which make no character, or tokens without text, must not slow down the
    whole engine.
    """
    check_work(byte_fallback(), FALLBACK[loop])


@pytest.mark.parametrize("loop", [b"\xff", b"\xf0", "é".encode(), b"a\xf0\x9f"])
def test_the_work_grows_with_the_tokens_of_byte_level_tokenizers(loop: bytes) -> None:
    alphabet = crossing()
    ids = {bytes([byte]): alphabet.token_to_id(char) for byte, char in CHARACTERS.items()}
    check_work(alphabet, [ids[bytes([byte])] for byte in loop])
    check_work(alphabet, [256])


def check_work(tokenizer: Tokenizer, loop: list[int], count: int = 3000) -> None:
    codec = CountingCodec(tokenizer, {}, None, None)
    tokens = (loop * count)[:count]
    detokenizer = Detokenizer(codec)
    for token in tokens:
        detokenizer.push(token)
    assert codec.decoded < 120 * count, f"{codec.decoded / count:.0f} tokens decoded for each"


def test_bytes_that_make_no_character_come_out_after_four() -> None:
    codec = TextCodec(byte_fallback(), {}, None, None)
    detokenizer = Detokenizer(codec)
    assert [detokenizer.push(0xFF) for _ in range(6)] == ["", "", "", *["\ufffd"] * 3]
    assert detokenizer.finish() == "\ufffd" * 3


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([0x41, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF]), max_size=60))
def test_pieces_of_any_bytes_add_up_to_the_whole(data: list[int]) -> None:
    """Byte-level decoders mark each broken character alone, so any bytes read in pieces are what they are
    in one.
    """
    tokenizer = crossing()
    codec = TextCodec(tokenizer, {}, None, None)
    tokens = [tokenizer.token_to_id(CHARACTERS[byte]) for byte in data]
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == bytes(data).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aaab", ["aab"], "a"),
        ("abababac", ["ababac"], "ab"),
        ("one two", ["twofold", "x"], "one two"),
        ("stop", ["stop"], ""),
        ("nothing", [], "nothing"),
        ("xyz", ["yz", "xy"], ""),
    ],
)
def test_stop_strings(text: str, stops: list[str], expected: str, size: int) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for start in range(0, len(text), size):
        out += matcher.push(text[start : start + size])
        assert expected.startswith(out)
    assert out + matcher.finish() == expected
    assert (matcher.matched is not None) == (expected != text)


def test_a_stop_string_that_only_the_end_completes() -> None:
    codec = tiny_codec()
    stream = TextStream(codec, ["\ufffd"])
    out = "".join(stream.push(token) for token in codec.tokenizer.encode("ab😀").ids[:-1])
    assert (out + stream.finish(), stream.stopped) == ("ab", True)


def test_chat_template() -> None:
    codec = tiny_codec()
    messages = [{"role": "user", "content": "Hi <b>"}]
    assert codec.render_chat(messages) == "<|bos|><|user|>Hi <b><|end|><|assistant|>"
    assert codec.encode_chat(messages)[:2] == [256, 259]


@pytest.mark.parametrize("content", ["", "e", "d", "<", "end", "Hi ", "Hi there"])
def test_a_message_is_continued_where_it_ends(content: str) -> None:
    """Covers a message so short that the template's own words contain it, and one that ends in a blank that
    the template strips.
    """
    messages = [{"role": "user", "content": "Hi end"}, {"role": "assistant", "content": content}]
    assert (
        tiny_codec().render_chat(messages, continue_last=True)
        == f"<|bos|><|user|>Hi end<|end|><|assistant|>{content}"
    )
    strips = TextCodec(
        tiny.tokenizer(), {}, "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}", None
    )
    assert strips.render_chat(messages, continue_last=True) == f"[Hi end][{content}"
    drops = TextCodec(tiny.tokenizer(), {}, "{{ messages[0]['content'] }}", None)
    with pytest.raises(RequestError, match="leaves out the last message"):
        drops.render_chat(messages, continue_last=True)


def test_template_helpers() -> None:
    template = (
        "{%- for m in messages %}\n{%- if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}\n"
        "{{ m | tojson }} {{ strftime_now('%Y') | length }} {{ bos_token }}{% break %}{%- endfor %}"
    )
    codec = TextCodec(tiny.tokenizer(), {"bos_token": {"content": "<|bos|>"}}, template, None)
    assert (
        codec.render_chat([{"role": "é", "content": "<"}, {"role": "b"}]).strip()
        == '{"role": "é", "content": "<"} 4 <|bos|>'
    )
    with pytest.raises(RequestError, match="no x"):
        codec.render_chat([{"role": "x"}])
    escape = TextCodec(tiny.tokenizer(), {}, "{{ messages.__class__.__mro__ }}", None)
    with pytest.raises(RequestError, match="chat template rejects"):
        escape.render_chat([])
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec(tiny.tokenizer(), {}, None, None).render_chat([])


def test_empty_and_broken_prompts() -> None:
    codec = tiny_codec()
    assert codec.encode("") == [256]
    assert codec.encode("a") == codec.tokenizer.encode("a").ids
    with pytest.raises(RequestError, match="lone surrogate '\\\\ud800' at character 2") as caught:
        codec.encode("ab\ud800c")
    assert caught.value.param == "prompt"
    stories = TextCodec(
        Tokenizer.from_file(str(shared_data("models", "stories260K", "tokenizer.json"))), {}, None, 1
    )
    assert stories.encode("") == [1]
    assert stories.encode("Once")[0] == 1


def test_token_bytes(codec: TextCodec) -> None:
    for text in TEXTS:
        tokens = codec.tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(map(codec.token_bytes, tokens)).decode()
        assert joined.removeprefix(" ") == codec.decode(tokens).removeprefix(" ")
    assert codec.token_bytes(10**7) == b""
