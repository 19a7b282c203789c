"""The browser's text codec against Python's tokenizers and chat templates: the same ids, the same texts."""

import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from nearfar.build.browser.tokenizers import unknown_in
from nearfar.edge_runtime.text.codec import TextCodec, TextStream
from tests.shared_data import shared_data
from tests.support.codec_server import ask
from tests.support.late import late

jinja2 = pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")
transformers = late("transformers")

from tests.support import sample_tokenizers as samples  # noqa: E402

REAL = {
    "stories260K": "models/stories260K",
    "classics-1M": "models/classics-1M",
    "classics-7M": "models/classics-7M",
    "smollm": "tokenizers/smollm-bytelevel-bpe-49k",
    "phi3": "tokenizers/phi3-bpe-32k",
}
NAMES = [*REAL, *samples.TRAINED]


@dataclass
class Job:
    """The questions to Node about one tokenizer."""

    tokenizer_json: dict[str, Any]
    tokenizer_config: dict[str, Any]
    chat_template: str | None = None
    bos_token_id: int | None = None
    encode: list[dict[str, Any]] = field(default_factory=list)
    decode: list[list[int]] = field(default_factory=list)
    chat: list[dict[str, Any]] = field(default_factory=list)
    streams: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        files: dict[str, Any] = {
            "tokenizerJson": self.tokenizer_json,
            "tokenizerConfig": self.tokenizer_config,
        }
        if self.chat_template is not None:
            files["chatTemplate"] = self.chat_template
        body = {
            "files": files,
            "special": {"bosTokenId": self.bos_token_id, "eosTokenIds": []},
            **{"encode": self.encode, "decode": self.decode, "chat": self.chat, "streams": self.streams},
        }
        answer: dict[str, Any] = ask(body)
        return answer


def tokenizer_files(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if name in samples.TRAINED:
        return samples.trained(name, samples.training_text(shared_data()))
    folder = shared_data(REAL[name])
    config = folder / "tokenizer_config.json"
    file = json.loads((folder / "tokenizer.json").read_text())
    return file, json.loads(config.read_text()) if config.exists() else {}


@cache
def reference(name: str) -> "tokenizers.Tokenizer":
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(name)[0]))


def job_for(name: str) -> Job:
    file, config = tokenizer_files(name)
    return Job(file, config)


def test_every_step_of_tokenizers_gives_pythons_ids() -> None:
    wrong, refused = [], []
    for name, python in samples.made_up().items():
        file = json.loads(python.to_str())
        refused += [(name, what) for what in unknown_in(file)]
        job = Job(file, {}, encode=[{"text": text, "addSpecialTokens": True} for text in samples.AWKWARD])
        for text, ours in zip(samples.AWKWARD, job.run()["encode"], strict=True):
            if ours != (theirs := python.encode(text).ids):
                wrong.append((name, text, theirs, ours))
    assert not wrong
    assert not refused


REPLACED = {
    "shorter": (" .", "."),
    "longer": ("a", "aa b"),
    "lines": ("\n ", "\n"),
    "nothing": ("ab", ""),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_replacement_in_the_whole_text_is_the_same_piece_by_piece(name: str) -> None:
    """As in ggml-org/ggml#1093: the replaced text lies in two tokens."""
    part, by = REPLACED[name]
    python = samples.made_up()["bpe, none"]
    python.decoder = tokenizers.decoders.Sequence(
        [
            *(tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()),
            *(tokenizers.decoders.Replace(part, by), tokenizers.decoders.Strip(" ", 1, 0)),
        ]
    )
    texts = ["x .", " x . . y ..  .", "x\n a\n\n  b\n ", "abab ab aab b", "a" * 40 + " ." * 30, "🍣 .🍣"]
    lists = [python.encode(text, add_special_tokens=False).ids for text in texts]
    job = Job(json.loads(python.to_str()), {}, decode=lists)
    assert not unknown_in(job.tokenizer_json)
    assert ["".join(pieces) for pieces in job.run()["decode"]] == [python.decode(ids) for ids in lists]
    codec = TextCodec(python, {}, None, None)
    for ids in lists:
        stream = TextStream(codec, ())
        assert "".join([*map(stream.push, ids), stream.finish()]) == python.decode(ids)


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("normalizer", {"type": "Precompiled"}, "the normalizer Precompiled"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Nmt"}]}, "the normalizer Nmt"),
        ("pre_tokenizer", {"type": "UnicodeScripts"}, "the pre_tokenizer UnicodeScripts"),
        ("model", {"type": "WordPiece"}, "a model of type WordPiece"),
        ("model", {"type": "BPE", "end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>'"),
        ("post_processor", {"type": "Strange"}, "the post_processor Strange"),
        ("decoder", None, "no decoder"),
        ("decoder", {"type": "BPEDecoder"}, "the decoder BPEDecoder"),
        (
            "decoder",
            {"type": "Sequence", "decoders": [{"type": "Strip"}, {"type": "Fuse"}]},
            "the decoder Strip in such a sequence",
        ),
    ],
)
def test_what_of_a_tokenizer_is_refused_for_browsers(part: str, value: object, told: str) -> None:
    file = json.loads(samples.made_up()["bpe, none"].to_str())
    assert unknown_in(file) == []
    assert told in unknown_in({**file, part: value})


@pytest.mark.parametrize("name", NAMES)
def test_the_build_takes_published_tokenizers(name: str) -> None:
    assert unknown_in(tokenizer_files(name)[0]) == []


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_equal_pythons(name: str) -> None:
    texts = [*samples.NASTY, *samples.real_texts(shared_data())]
    python = reference(name)
    job = job_for(name)
    job.encode = [{"text": text, "addSpecialTokens": special} for text in texts for special in (True, False)]
    expected = [
        python.encode(text, add_special_tokens=special).ids for text in texts for special in (True, False)
    ]
    job.decode = [ids for ids in expected if ids]
    answer = job.run()
    for asked, theirs, ours in zip(job.encode, expected, answer["encode"], strict=True):
        assert ours == theirs, f"ids of {asked['text'][:80]!r}"
    for ids, pieces in zip(job.decode, answer["decode"], strict=True):
        assert "".join(pieces) == python.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_decodes_of_random_ids_equal_pythons(name: str) -> None:
    python = reference(name)
    rng = random.Random(7)
    job = job_for(name)
    size = python.get_vocab_size()
    job.decode = [[rng.randrange(size) for _ in range(rng.randint(1, 25))] for _ in range(200)]
    byte_level = json.dumps(job.tokenizer_json["decoder"]).find('"ByteLevel"') >= 0
    compared = 0
    for ids, pieces in zip(job.decode, job.run()["decode"], strict=True):
        theirs = python.decode(ids)
        if not byte_level and "\ufffd" in theirs:
            # Python's ByteFallback spoils every byte of a run with one bad byte in it, even the good
            # characters before: a stream has long shown those. Ours marks the bad bytes alone, as byte-level
            # decoders do everywhere.
            continue
        compared += 1
        assert "".join(pieces) == theirs
    assert compared >= 20


@pytest.mark.parametrize("name", NAMES)
def test_no_piece_of_a_stream_is_a_broken_character(name: str) -> None:
    text = "".join(text for text in samples.NASTY if "\ufffd" not in text)
    job = job_for(name)
    job.decode = [reference(name).encode(text, add_special_tokens=False).ids]
    pieces = job.run()["decode"][0]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", ["stories260K", "classics-7M", "phi3"])
def test_a_stop_string_ends_the_stream_wherever_token_borders_fall(name: str) -> None:
    python = reference(name)
    text = "The quick brown fox jumps over the lazy dog. ### The end of it."
    ids = python.encode(text, add_special_tokens=False).ids
    stops = [
        ["fox j"],
        ["zy d", "never"],
        ["###"],
        ["."],
        ["not in it"],
        ["The end of it.?"],
        [""],
        ["over", "brown"],
    ]
    job = job_for(name)
    job.streams = [{"ids": ids, "stop": stop} for stop in stops]
    for stop, answer in zip(stops, job.run()["streams"], strict=True):
        cuts = [text.find(one) for one in stop if one and one in text]
        assert "".join(answer["pieces"]) == (text[: min(cuts)] if cuts else text)
        assert answer["stopped"] == bool(cuts)


@pytest.mark.parametrize("name", NAMES)
def test_a_continued_text_equals_the_text_in_one_piece(name: str) -> None:
    python = reference(name)
    ids = python.encode("Once upon a time, there was a fox.").ids
    job = job_for(name)
    cuts = range(1, len(ids))
    job.streams = [{"ids": ids[cut:], "stop": [], "context": ids[:cut]} for cut in cuts]
    for cut, answer in zip(cuts, job.run()["streams"], strict=True):
        assert python.decode(ids[:cut]) + "".join(answer["pieces"]) == python.decode(ids)


def test_an_empty_prompt_is_just_bos() -> None:
    for name, bos in (("stories260K", 1), ("classics-7M", 0)):
        job = job_for(name)
        job.bos_token_id = bos
        job.encode = [{"text": "", "addSpecialTokens": True}, {"text": "", "addSpecialTokens": False}]
        assert job.run()["encode"] == [[bos], []]


CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Tell me a story."}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  Why? <b>&amp; \"quotes\"</b> 'x'  "},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n\nHow are you? 😀"},
        {"role": "user", "content": "क्या हाल है?\r\n"},
    ],
    [{"role": "user", "content": ""}],
]


@pytest.mark.parametrize("name", ["classics-1M", "classics-7M", "phi3"])
def test_own_chat_templates_equal_transformers(name: str) -> None:
    compare_chats(name, None)


@pytest.mark.parametrize("template", samples.TEMPLATES)
def test_common_chat_templates_equal_transformers(template: str) -> None:
    compare_chats("phi3", samples.TEMPLATES[template])


def compare_chats(name: str, template: str | None) -> None:
    job = job_for(name)
    job.chat_template = template
    tokens = {k: v for k, v in job.tokenizer_config.items() if k.endswith("_token") and isinstance(v, str)}
    python = transformers.PreTrainedTokenizerFast(tokenizer_object=reference(name), **tokens)
    python.chat_template = template or job.tokenizer_config["chat_template"]
    job.chat = [
        {"messages": talk, "addGenerationPrompt": prompt}
        for talk in CONVERSATIONS
        for prompt in (True, False)
    ]
    rendered = [render(python, **asked) for asked in job.chat]
    assert any(text is not None for text, _ in rendered)
    for (text, refusal), ours in zip(rendered, job.run()["chat"], strict=True):
        if text is None:
            assert refusal in ours["error"]
        else:
            assert ours == reference(name).encode(text, add_special_tokens=False).ids


def render(python: Any, messages: list[dict[str, str]], addGenerationPrompt: bool) -> tuple[str | None, str]:
    """The text that the template makes of the messages in Python, or None and the template's reason to
    refuse.
    """
    try:
        text = python.apply_chat_template(messages, add_generation_prompt=addGenerationPrompt, tokenize=False)
    except jinja2.exceptions.TemplateError as error:
        return None, str(error)
    return text, ""


@pytest.mark.parametrize("name", ["classics-1M", "classics-7M", "phi3"])
def test_a_begun_answer_is_rendered_as_in_python(name: str) -> None:
    python = TextCodec.open_directory(shared_data(REAL[name]), None)
    job = job_for(name)
    begun = ["Once", "Once upon a", "a man who said: \n\n“No.”", "  spaces  ", ""]
    talks = [[*CONVERSATIONS[0], {"role": "assistant", "content": text}] for text in begun]
    job.chat = [{"messages": talk, "continueLast": True} for talk in talks]
    assert job.run()["chat"] == [python.encode_chat(talk, continue_last=True) for talk in talks]
