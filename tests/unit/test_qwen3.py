"""Qwen3: its config, and logits and greedy tokens of its norms of queries and keys against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine, SamplingParams
from nearfar.step.models import architecture
from tests.support import tiny

CONFIG: dict[str, Any] = {
    **tiny.CONFIG, "model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-6, "attention_bias": False,
    "architectures": ["Qwen3ForCausalLM"], "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip


def parse(**changes: Any) -> Any:
    config = {**CONFIG, **changes}
    return architecture(config).parse(config)


def test_its_config_is_a_llamas_with_norms_and_heads_of_128() -> None:
    parsed = parse()
    assert (parsed.architecture, parsed.qk_norm, parsed.head_dim, parsed.layer_types) == ("qwen3", True, 16, ())
    assert parse(head_dim=None).head_dim == 128
    windows = parse(use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert (windows.sliding_window, windows.layer_types) == (64, ("full_attention", "sliding_attention"))
    assert parse(use_sliding_window=True, sliding_window=64, max_window_layers=2).sliding_window is None
    assert parse(use_sliding_window=False, sliding_window=64, max_window_layers=1).sliding_window is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that transformers made, with norms that are not all ones."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{k: v for k, v in CONFIG.items() if k != "model_type"}))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(root)
    tiny.tokenizer().save(str(root / "tokenizer.json"))
    return root


@pytest.mark.parametrize("target", ["cpu", "mlx"])
def test_answers_are_those_of_transformers(checkpoint: Path, tmp_path: Path, target: str) -> None:
    if target == "mlx":
        pytest.importorskip("mlx.core")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    (made,) = build(BuildOptions(str(checkpoint), tmp_path / "out", targets=(target,), quant="none"))
    prompt = np.random.default_rng(3).integers(0, 256, 40).tolist()
    with Engine.load(made, precision="f32", kv_memory="1MB") as engine:
        tokens = [e.token for e in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))]
        ours = engine.asynchronous.core.executor.fetch("logits", 1)()[0]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0].numpy()
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    # The last step is the one that gave the last token.
    assert np.abs(ours - logits[-2]).max() < 2e-3 * np.abs(logits).max()


def test_the_exported_function_normalizes_queries_and_keys(checkpoint: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = BuildOptions(str(checkpoint), tmp_path / "out", targets=("mlx",), quant="none", export_function=True)
    (made,) = build(options)
    prompt = np.random.default_rng(3).integers(0, 256, 40).tolist()
    row = mx.array([list(range(len(prompt)))], mx.int32)
    cache = [mx.zeros((1, CONFIG["num_key_value_heads"], 0, CONFIG["head_dim"]))] * (2 * CONFIG["num_hidden_layers"])
    step = mx.import_function(str(made / "step.mlxfn"))
    inputs = (mx.array([prompt], mx.int32), row, row, mx.zeros((1, 0), mx.int32), *cache)
    ours = np.array(step(inputs, mx.load(str(made / "model.safetensors")))[0])[0]
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        logits = reference(torch.tensor([prompt])).logits[0].numpy()
    assert ours.argmax(-1).tolist() == logits.argmax(-1).tolist()
    assert np.abs(ours - logits).max() < 2e-3 * np.abs(logits).max()
