"""GGUF files: blocks equal those of the gguf package, tokenizers come back unchanged, unsupported files are
rejected.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nearfar.build.options import BuildOptions
from nearfar.build.source import open_source
from nearfar.build.weights.gguf.header import read_header
from nearfar.build.weights.gguf.tokenizer import read_tokenizer
from nearfar.build.weights.quantize import Scheme, dequantize
from nearfar.build.weights.quantized.contract import held_in, joint
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS, read_rows
from nearfar.build.weights.quantized.gguf_grids import TABLES
from nearfar.errors import CheckpointError
from nearfar.format.scales import IQ4, OF_GGUF, PAIRS, SYMMETRIC
from nearfar.kernels.quantized import StorableMatrices
from scripts.freeze_grids import frozen
from tests.shared_data import shared_data
from tests.support import gguf_files


@pytest.mark.parametrize("kind", gguf_files.HALVES)
def test_blocks_are_what_the_gguf_package_makes_of_them(kind: str) -> None:
    rows = gguf_files.random_rows(kind, 6, 512)
    found = read_rows(kind, rows, gguf.GGML_QUANT_SIZES[gguf_files.KINDS[kind]][1])
    assert int(found.codes.max()) < 2 ** BLOCKS[kind].bits
    assert found.scales.shape[1] == 512 // BLOCKS[kind].group
    np.testing.assert_allclose(found.weights(), gguf_files.floats(rows, kind), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", IQ4)
def test_a_target_without_tables_stores_their_values(kind: str) -> None:
    rows = gguf_files.random_rows(kind, 6, 512)
    found = read_rows(kind, rows, gguf.GGML_QUANT_SIZES[gguf_files.KINDS[kind]][1])
    scheme, floats = BLOCKS[kind].scheme(512), gguf_files.floats(rows, kind)
    assert scheme is not None
    for held, bits in ((StorableMatrices(), 4), (StorableMatrices.pairs(), 8)):
        stored = held_in(scheme, held)
        assert stored is not None
        carried = found.carried(scheme.bits, kind, stored.scales)
        assert stored.bits == carried.rows.bits == bits
        made = dequantize(carried.rows, stored.group_size, stored.scales)
        assert carried.change < 0.1
        changed = carried.change * np.abs(found.scales).max()
        np.testing.assert_allclose(made, floats, rtol=1e-6, atol=changed)
        assert (carried.change > 0) == (kind == "IQ4_XS" and stored.scales == PAIRS)


def test_tensors_with_and_without_a_table_share_a_scheme_without() -> None:
    table, five = Scheme(4, 32, IQ4["IQ4_NL"]), Scheme(5, 32, SYMMETRIC)
    assert joint([table, table]) == table
    assert joint([table, five]) == joint([table, table.linear]) == Scheme(8, 32, SYMMETRIC)


def test_the_frozen_grids_are_those_of_the_gguf_package() -> None:
    assert json.loads(TABLES.read_text(encoding="utf-8")) == frozen()


def test_types_that_grow_are_told(tmp_path: Path) -> None:
    file, _ = gguf_files.mixed(tmp_path, "IQ2_XXS")
    (note,) = open_source(BuildOptions(str(file), tmp_path / "out")).notes
    assert note.startswith("weights of IQ2_XXS (8 bits, 4.4 times) keep their codes")
    assert "--requantize q4" in note
    assert open_source(BuildOptions(str(file), tmp_path / "out", requantize="q4")).notes == ()


def test_four_bits_are_not_advised_where_they_are_not_smaller(tmp_path: Path) -> None:
    file, _ = gguf_files.mixed(tmp_path, "IQ1_S")
    (note,) = open_source(BuildOptions(str(file), tmp_path / "out")).notes
    assert "IQ1_S (2 bits" in note
    assert "--requantize" not in note


@pytest.mark.parametrize("kind", sorted({*OF_GGUF, *IQ4}))
def test_types_that_targets_store_in_the_bytes_of_the_file_do_not_grow(kind: str, tmp_path: Path) -> None:
    file, _ = gguf_files.mixed(tmp_path, kind)
    assert open_source(BuildOptions(str(file), tmp_path / "out")).notes == ()


def damaged(tmp_path: Path, key: str, value: int) -> Path:
    """A file in Q4_0 whose metadata have another integer."""
    file, _ = gguf_files.mixed(tmp_path, "Q4_0")
    data = bytearray(file.read_bytes())
    at = data.index(key.encode()) + len(key)
    struct.pack_into("<I", data, at + 4, value)
    file.write_bytes(data)
    return file


def test_tensors_of_other_shapes_are_told_in_weights_and_without_a_config(tmp_path: Path) -> None:
    file = damaged(tmp_path, "llama.feed_forward_length", 512)
    with pytest.raises(CheckpointError) as refused:
        open_source(BuildOptions(str(file), tmp_path / "out"))
    said = str(refused.value)
    assert "those that its metadata describes" in said
    assert "config.json" not in said
    assert "adapters" not in said
    assert "down_proj.weight is [256, 256], not [256, 512]" in said


def test_metadata_that_contradict_themselves_name_the_file(tmp_path: Path) -> None:
    file = damaged(tmp_path, "llama.attention.head_count", 3)
    with pytest.raises(CheckpointError, match="heads") as refused:
        open_source(BuildOptions(str(file), tmp_path / "out"))
    assert str(refused.value).startswith(str(file))
    assert "config.json" not in str(refused.value)


def test_mxfp4_is_as_its_paper_has_it() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (3, 2 * 17), dtype=np.uint8)
    rows[:, [0, 17]] = rng.integers(120, 134, (3, 2))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array([*values, *(-value for value in values)])
    expected = [
        [table[byte >> shift & 15] * 2.0 ** (int(row[at]) - 127)
         for at in (0, 17) for shift in (0, 4) for byte in row[at + 1 : at + 17]]
        for row in rows
    ]  # fmt: skip
    np.testing.assert_array_equal(read_rows("MXFP4", rows, 17).weights(), np.array(expected, np.float32))


def tokenizer_of(tmp_path: Path, data: dict, architecture: str, **write: object) -> Tokenizer:
    """Write a tokenizer.json into a GGUF file's metadata, and convert these back."""
    file = tmp_path / "model"
    writer = gguf.GGUFWriter(file, architecture)
    write["vocabulary"](writer, data)  # type: ignore[operator]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(file).metadata
    made = read_tokenizer(file, metadata, len(metadata["tokenizer.ggml.tokens"]))
    return Tokenizer.from_buffer(made.json)


ODD = (
    "", " ", "  two  spaces ", "\n\n\ttabs\r\n", "don't WE'LL it's", "1234567 3.14 ½ ²", "naïve café ñ",
    "日本語テキスト と 한국어", "🤷🏽‍♀️ emoji", "a\u0301 combining", "x = {'a': [1, 2]}  # code\n    return",
    "<|user|>\nHello<|end|>\n<|assistant|>\n", "<|im_start|>user\nhi<|im_end|>", "</s> <s> <unk>",
    "\u0000\u200b",
)  # fmt: skip


def texts() -> list[str]:
    """Unusual texts, and pieces of books."""
    book = shared_data("text", "heldout.txt").read_text(encoding="utf-8")
    return [*ODD, *(book[at : at + 997] for at in range(0, 200_000, 9973))]


@pytest.mark.parametrize(
    ("name", "architecture", "pre"),
    [
        ("tokenizers/smollm-bytelevel-bpe-49k", "llama", "smollm"),
        ("models/classics-7M", "llama", "gpt-2"),
        ("tokenizers/phi3-bpe-32k", "phi3", None),
        ("models/stories260K", "llama", None),
    ],
)
def test_a_tokenizer_comes_back_as_it_was(
    name: str, architecture: str, pre: str | None, tmp_path: Path
) -> None:
    file = shared_data(*name.split("/")) / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))

    def vocabulary(writer: gguf.GGUFWriter, data: dict) -> None:
        if pre is None:
            gguf_files.sentencepiece(writer, data)
            writer.add_bos_token_id(1)
        else:
            gguf_files.byte_level(writer, data, pre)

    found, expected = (
        tokenizer_of(tmp_path, data, architecture, vocabulary=vocabulary),
        Tokenizer.from_file(str(file)),
    )
    for text in texts():
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == expected.decode(ids), text


def like_gemma() -> Tokenizer:
    """A small BPE tokenizer like Gemma's: bytes for unknown characters, blanks written as ▁, and no blank
    before a text.
    """
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]  # type: ignore[list-item]
    )
    every = [f"<0x{byte:02X}>" for byte in range(256)]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *turns, *every],
        show_progress=False,
    )
    made.train_from_iterator(texts(), trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] not in every]
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4"])
def test_the_tokenizer_of_gemma_comes_back_as_it_was(architecture: str, tmp_path: Path) -> None:
    expected = like_gemma()

    def vocabulary(writer: gguf.GGUFWriter, data: dict) -> None:
        gguf_files.sentencepiece(writer, data, architecture == "gemma4")
        writer.add_add_space_prefix(False)

    found = tokenizer_of(tmp_path, json.loads(expected.to_str()), architecture, vocabulary=vocabulary)
    for text in [*texts(), "<start_of_turn>user\nhi there<end_of_turn>\n"]:
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == expected.decode(ids), text


def test_an_unknown_way_to_split_words_is_refused_by_name(tmp_path: Path) -> None:
    from tests.support import tiny

    data = json.loads(tiny.tokenizer().to_str())
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is 'viking'"):
        tokenizer_of(tmp_path, data, "llama", vocabulary=lambda w, d: gguf_files.byte_level(w, d, "viking"))


def test_marks_are_parts_of_words_in_qwen_35(tmp_path: Path) -> None:
    """Vowel signs are marks, not letters: qwen2 cuts a word in front of them."""
    from tests.support import tiny

    data, hindi = json.loads(tiny.tokenizer().to_str()), "हिन्दी"
    data["model"]["vocab"]["zz"], data["model"]["merges"] = data["model"]["vocab"].pop("ÿ"), ["z z"]
    words = {}
    for pre in ("qwen2", "qwen35"):
        (tmp_path / pre).mkdir()

        def vocabulary(writer: gguf.GGUFWriter, data: dict, pre: str = pre) -> None:
            gguf_files.byte_level(writer, data, pre)

        made = tokenizer_of(tmp_path / pre, data, "qwen35", vocabulary=vocabulary)
        assert made.pre_tokenizer is not None
        words[pre] = len(made.pre_tokenizer.pre_tokenize_str(hindi))
    assert words["qwen35"] == 1 < words["qwen2"]
