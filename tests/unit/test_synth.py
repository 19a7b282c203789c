"""Synthetic checkpoints: published shapes, every architecture loads in transformers, seeds repeat."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nearfar.build.synth import STD, ConfigShape, published, shape_names, synth_checkpoint, write_checkpoint
from nearfar.build.unread import check_unread
from nearfar.build.weights.checks import check_tensors
from nearfar.build.weights.headers import flattened
from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantized.contract import RequiredTensor
from nearfar.cli import typer_app
from nearfar.errors import BuildError
from nearfar.step import ops
from nearfar.step.reading import read_model
from tests.support.architectures import CASES, eager
from tests.support.cases import Case

SMALL = next(case for case in CASES if case.model_type == "llama")
TEXT = {case.model_type: case for case in CASES if "text_config" not in case.config}

COUNTS = {
    "ernie-4.5-0.3b": 360_748_032,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "granite-3.3-2b": 2_533_539_840,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "olmo-2-1b": 1_484_916_736,
    "phi-3.5-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
}
"""Parameters as their publishers count them."""


def shape_of(case: Case) -> ConfigShape:
    return ConfigShape({**case.config, "model_type": case.model_type, "vocab_size": 600})


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_published_parameter_counts(name: str, count: int) -> None:
    assert sum(tensor.size for tensor in published(name).tensors.values()) == count


@pytest.mark.parametrize("name", shape_names())
def test_a_published_shape_is_that_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = published(name)
    reading = read_model(dict(shape.config))
    check_unread(reading.config, reading.model_type)
    config = transformers.AutoConfig.for_model(**shape.config)
    with torch.device("meta"):
        weights = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    params = read_model(dict(shape.config), weights).model.step.params
    read = {name: of for param in params for name, of in param.expected().items()}
    assert {key: flattened(tuple(value.shape)) for key, value in weights.items()} == read
    written = {name: flattened(tensor.shape) for name, tensor in shape.tensors.items()}
    apart = {name for name in written if name not in read}  # each expert by itself, as it is published
    assert all(".experts." in name for name in apart)
    assert {name: of for name, of in written.items() if name in read}.items() <= read.items()
    assert shape.model
    assert shape.source


@pytest.mark.parametrize("case", TEXT.values(), ids=str)
def test_transformers_loads_every_architecture(case: Case, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape, seen = shape_of(case), []
    write_checkpoint(
        shape, tmp_path / "m", 1, lambda done, total: seen.append((done, total)), file_bytes=100_000
    )
    assert seen[-1][0] == seen[-1][1]
    checkpoint = open_checkpoint(tmp_path / "m")
    assert len(checkpoint.tensor_files) > 1
    check_tensors(checkpoint, {n: RequiredTensor(flattened(t.shape)) for n, t in shape.tensors.items()})
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", output_loading_info=True, **eager(case)
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[500, 3, 4]])).logits).all()
    step = shape.built.step
    named = {param.name: param for param in step.params}
    embedding = next(op for op in step.ops if isinstance(op, ops.Embed))
    values = checkpoint.read(named[embedding.table].pieces[0].tensor).astype(np.float32)
    assert abs(values.std() / STD - 1) < 0.05
    norm = named[next(op.weight for op in reversed(step.ops) if isinstance(op, ops.Norm))]
    stored = checkpoint.read(norm.pieces[0].tensor).astype(np.float32)
    assert (norm.folded(stored) == norm.scale).all()


def test_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(shape_of(SMALL), tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == 600
    assert sorted(tokenizer.get_vocab().values()) == list(range(600))
    text = "Once, naïve — 日本 🙂\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n"
    assert tokenizer(turn).input_ids[0] == 256


@pytest.mark.parametrize(("bos", "eos", "special"), [(7, [8, 9], {7: "<|turn|>", 9: "<|end|>"}),
    (7, 7, {6: "<|turn|>", 7: "<|end|>"}), (0, 0, {599: "<|turn|>", 0: "<|end|>"}),
    (None, None, {598: "<|turn|>", 599: "<|end|>"})])  # fmt: skip
def test_special_tokens_of_any_config(
    bos: int | None, eos: object, special: dict[int, str], tmp_path: Path
) -> None:
    shape = ConfigShape({**shape_of(SMALL).config, "bos_token_id": bos, "eos_token_id": eos})
    assert shape.special == special
    write_checkpoint(shape, tmp_path / "m")
    assert (tmp_path / "m" / "tokenizer.json").is_file()


def test_seeds_repeat_and_differ(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_checkpoint(shape_of(SMALL), tmp_path / name, seed)
    a, b, c = (open_checkpoint(tmp_path / name) for name in "abc")
    assert a.sha256() == b.sha256() != c.sha256()
    write_checkpoint(shape_of(SMALL), tmp_path / "c", 3)
    assert open_checkpoint(tmp_path / "c").sha256() == a.sha256()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"gpt-5.*smollm2-135m"):
        synth_checkpoint("gpt-5", tmp_path / "m")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BuildError, match="not empty"):
        write_checkpoint(shape_of(SMALL), tmp_path)


def test_the_command_lists_shapes_and_says_what_it_needs() -> None:
    shown = CliRunner().invoke(typer_app, ["synth", "--list"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in shape_names())
    asked = CliRunner().invoke(typer_app, ["synth", "smollm2-135m"])
    assert asked.exit_code == 2
