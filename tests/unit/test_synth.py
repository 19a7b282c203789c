"""Synthetic checkpoints: published parameter counts, real transformers can load them, seeds repeat."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.weights.checkpoint import check_tensors, open_checkpoint
from nearfar.errors import BuildError
from nearfar.synth import SHAPES, Shape, synth_checkpoint, tensors, write_checkpoint

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 600, "head_dim": 16}
IDS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 500, "eos_token_id": 509}


def small(name: str) -> Shape:
    return replace(SHAPES[name], config={**SHAPES[name].config, **SMALL, **IDS}, turn_start=506, turn_end=509)


@pytest.mark.parametrize(
    ("name", "count"), [("llama-3.2-1b", 1_235_814_400), ("smollm2-135m", 134_515_008), ("qwen3-0.6b", 596_049_920)]
)
def test_published_parameter_counts(name: str, count: int) -> None:
    assert sum(math.prod(shape) for shape in tensors(SHAPES[name].config).values()) == count


@pytest.mark.parametrize("name", list(SHAPES))
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape, seen = small(name), []
    write_checkpoint(shape, tmp_path / "m", 1, lambda done, total: seen.append((done, total)), file_bytes=100_000)
    assert seen[-1][0] == seen[-1][1]
    checkpoint = open_checkpoint(tmp_path / "m")
    assert len(checkpoint.tensor_files) > 1
    check_tensors(checkpoint, tensors(shape.config))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[500, 3, 4]])).logits).all()
    values = checkpoint.read("model.embed_tokens.weight").astype(np.float32)
    assert abs(values.std() / shape.config["initializer_range"] - 1) < 0.05
    assert (checkpoint.read("model.norm.weight") == 1).all()


def test_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(small("llama-3.2-1b"), tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == 600
    assert sorted(tokenizer.get_vocab().values()) == list(range(600))
    text = "Once, naïve — 日本 🙂\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (500, 509)
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n"
    assert tokenizer(turn).input_ids[0] == 506


def test_seeds_repeat_and_differ(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_checkpoint(small("smollm2-135m"), tmp_path / name, seed)
    a, b, c = (open_checkpoint(tmp_path / name) for name in "abc")
    assert a.sha256() == b.sha256() != c.sha256()
    write_checkpoint(small("smollm2-135m"), tmp_path / "c", 3)
    assert open_checkpoint(tmp_path / "c").sha256() == a.sha256()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"gpt-5.*smollm2-135m"):
        synth_checkpoint("gpt-5", tmp_path / "m")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BuildError, match="not empty"):
        write_checkpoint(small("qwen3-0.6b"), tmp_path)
