"""Checkpoints that MLX quantized: the other targets get the same codes, scales and biases."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.source import open_source
from nearfar.build.weights.quantize import dequantize
from nearfar.edge_runtime import Engine, SamplingParams
from nearfar.errors import BuildError, CheckpointError
from nearfar.kernels.buckets import Buckets
from tests.support.late import late
from tests.support.paths import ROOT

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
mlx_lm = late("mlx_lm", reason="mlx-lm is not installed")

SAMPLE = ROOT / "examples" / "sample-model"
PROMPT = "The fox"
FEW: dict[str, Any] = {"cpu_features": ("native",), "buckets": Buckets((1, 16), (1,))}
"""Build options of programs for the CPU: one program with all sizes of steps takes 16 CPU seconds to compile,
and there is one for each vector unit.
"""


def convert(checkpoint: Path, out: Path, dtype: str, bits: int = 4, group: int = 64) -> Path:
    """Convert a checkpoint as `mlx_lm.convert -q` does."""
    mlx_lm.convert(str(checkpoint), str(out), quantize=True, q_bits=bits, q_group_size=group, dtype=dtype)
    return out


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(SAMPLE, tmp_path_factory.mktemp("converted") / "mlx-q4", "float16")


@pytest.fixture(scope="module")
def built(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built")
    build(BuildOptions(str(converted), out, targets=("cpu", "mlx"), **FEW))
    return out


def dequantized(root: Path) -> Any:
    """transformers on the weights that the directory represents."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()
    tensors = mx.load(str(root / "model.safetensors"))
    for name, parameter in model.named_parameters():
        base = name.removesuffix(".weight")
        wide = [
            tensors[f"{base}.{part}"].astype(mx.float32)
            for part in ("scales", "biases")
            if f"{base}.{part}" in tensors
        ]
        value = (
            tensors[name].astype(mx.float32)
            if not wide
            else mx.dequantize(tensors[name], *wide, group_size=64, bits=4)
        )
        parameter.data = torch.from_numpy(np.array(value))
    return model


def test_cpu_computes_with_the_weights_of_the_directory(converted: Path, built: Path) -> None:
    torch = pytest.importorskip("torch")
    with Engine.load(built / "cpu") as engine:
        answer = engine.completions.create(PROMPT, max_tokens=32, temperature=0).choices[0].text
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SAMPLE)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    out = dequantized(converted).generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)[0].tolist()
    assert answer == tokenizer.decode(out, skip_special_tokens=True)[len(PROMPT) :]


def test_nothing_is_requantized(converted: Path, built: Path) -> None:
    before, after = (load_file(root / "model.safetensors") for root in (converted, built / "mlx"))
    assert set(before) == set(after)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    quantization = json.loads((built / "cpu" / "manifest.json").read_text())["quantization"]
    assert (quantization["scheme"], quantization["method"]) == ("q4", "as in the checkpoint")


def test_matrices_may_differ_in_bits_and_groups(tmp_path: Path) -> None:
    def mixed(path: str, _module: Any) -> bool | dict[str, int]:
        if (
            "v_proj" in path or "embed" in path
        ):  # bits as in mlx-lm's mixed recipes: v has more bits than q and k beside it
            return {"group_size": 32, "bits": 6}
        return {"group_size": 64, "bits": 4}

    out = tmp_path / "mixed"
    mlx_lm.convert(
        str(SAMPLE),
        str(out),
        quantize=True,
        q_bits=4,
        q_group_size=64,
        dtype="float16",
        quant_predicate=mixed,
    )
    made = build(BuildOptions(str(out), tmp_path / "built", targets=("cpu", "mlx"), **FEW))
    stored = {
        m["name"]: m for m in json.loads((made[0] / "manifest.json").read_text())["quantization"]["matrices"]
    }
    assert [stored["layers.0.qkv"][key] for key in ("bits", "group_size")] == [6, 32]
    assert [stored["layers.0.o"][key] for key in ("bits", "group_size")] == [4, 64]
    model, tokenizer = mlx_lm.load(str(out))
    model.set_dtype(mx.float32)
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    expected = np.array(model(mx.array([ids]))[0, -1].astype(mx.float32))
    for path in made:
        with Engine.load(path, precision="f32") as engine:
            list(engine.generate(ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
            found = engine.asynchronous.core.executor.fetch("logits", 1)()[0]
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max(), path


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_modes_of_floats_are_what_mlx_makes_of_them(tmp_path: Path, mode: str, bits: int, group: int) -> None:
    out = tmp_path / mode
    mlx_lm.convert(
        str(SAMPLE), str(out), quantize=True, q_bits=bits, q_group_size=group, q_mode=mode, dtype="float16"
    )
    source = open_source(BuildOptions(str(out), tmp_path / "out"))
    assert source.quantized is not None
    tensors = mx.load(str(out / "model.safetensors"))
    for name, scheme in source.quantized.tensors.items():
        scales = tensors[f"{name.removesuffix('.weight')}.scales"]
        found = mx.dequantize(tensors[name], scales, group_size=group, bits=bits, mode=mode)
        expected = np.array(found.astype(mx.float32))
        np.testing.assert_array_equal(source.quantized.weights(name, 0, len(expected)), expected)
        assert (scheme is None) == (mode == "mxfp8")
        if scheme is not None:
            assert (scheme.bits, scheme.group_size) == (5, group)
            rows = source.quantized.carry(name, 0, len(expected))
            assert rows.change == 0
            np.testing.assert_array_equal(dequantize(rows.rows, group), expected)
    if mode == "mxfp4":  # and the artifact runs
        (made,) = build(BuildOptions(str(out), tmp_path / "built", targets=("cpu",), **FEW))
        with Engine.load(made) as engine:
            assert engine.completions.create(PROMPT, max_tokens=4, temperature=0).choices[0].text


def test_our_own_mlx_artifact_is_a_checkpoint_too(built: Path, tmp_path: Path) -> None:
    (again,) = build(BuildOptions(str(built / "mlx"), tmp_path, targets=("mlx",)))
    model = json.loads((again / "manifest.json").read_text())["model"]
    assert model["name"] == "mlx-q4", "the name of the first checkpoint, not of the artifact's directory"
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (built / "mlx" / name).read_bytes()


def test_scales_that_float16_cannot_hold_are_rounded_and_counted(tmp_path: Path) -> None:
    wide = convert(SAMPLE, tmp_path / "wide", "float32", bits=8, group=32)
    (made,) = build(BuildOptions(str(wide), tmp_path / "out", targets=("mlx",)))
    quantization = json.loads((made / "manifest.json").read_text())["quantization"]
    assert quantization["scheme"] == "q8"
    before, after = load_file(wide / "model.safetensors"), load_file(made / "model.safetensors")
    count = 0
    for name, value in before.items():
        if name.endswith((".scales", ".biases")):
            count += int((value.astype(np.float16).astype(np.float32) != value).sum())
            np.testing.assert_array_equal(after[name], value.astype(np.float16))
        elif value.dtype == np.uint32:
            np.testing.assert_array_equal(after[name], value)
    assert quantization["method"] == f"as in the checkpoint; {count:,} scales and biases rounded to float16"
    assert count > 0


def test_bfloat16_scales_are_exact(tmp_path: Path) -> None:
    brain = convert(SAMPLE, tmp_path / "brain", "bfloat16")
    (made,) = build(BuildOptions(str(brain), tmp_path / "out", targets=("mlx",)))
    assert (
        json.loads((made / "manifest.json").read_text())["quantization"]["method"] == "as in the checkpoint"
    )
    before, after = (mx.load(str(root / "model.safetensors")) for root in (brain, made))
    assert before["model.embed_tokens.scales"].dtype == mx.bfloat16
    for name, value in before.items():
        assert mx.array_equal(value.astype(mx.float32), after[name].astype(mx.float32)), name


def changed(converted: Path, out: Path, **quantization: Any) -> Path:
    shutil.copytree(converted, out)
    (out / "model.safetensors.index.json").unlink()  # mlx_lm writes an index for a single file too
    config = json.loads((out / "config.json").read_text())
    config["quantization"] |= quantization
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"group_size": 256}, "group_size 256"),
        ({"mode": "mxfp4", "group_size": 64}, "mode 'mxfp4'"),
        ({"mode": "nf4"}, "mode 'nf4'"),
        ({"bits": 7}, "bits 7"),
        (
            {"model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8}},
            r"model.layers.0.mlp.down_proj.weight is \[256, 88\], not \[256, 176\]",
        ),
    ],
)
def test_settings_that_are_not_read_are_named(
    converted: Path, tmp_path: Path, quantization: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_source(BuildOptions(str(changed(converted, tmp_path / "x", **quantization)), tmp_path / "out"))


def test_other_quantizers_are_named(converted: Path, tmp_path: Path) -> None:
    root = changed(converted, tmp_path / "x")
    config = json.loads((root / "config.json").read_text())
    del config["quantization"]
    (root / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "vptq"}}))
    with pytest.raises(CheckpointError, match='quantized by "vptq"'):
        open_source(BuildOptions(str(root), tmp_path / "out"))


def test_another_quantization_than_the_directorys_is_refused(converted: Path, tmp_path: Path) -> None:
    said = r"quantized already \(MLX: q4, group 64\) and --quant asks for q8.*--requantize q8"
    with pytest.raises(BuildError, match=said):
        open_source(BuildOptions(str(converted), tmp_path, quant="q8"))
    with pytest.raises(BuildError, match="leave --quant and --group-size out"):
        open_source(BuildOptions(str(converted), tmp_path, group_size=32))
    assert (
        open_source(BuildOptions(str(converted), tmp_path, quant="q4", group_size=64)).quantized is not None
    )


def test_parts_that_are_computed_together_are_floats_where_one_is(converted: Path, tmp_path: Path) -> None:
    root = changed(converted, tmp_path / "x", **{"model.layers.1.self_attn.k_proj": False})
    tensors = load_file(root / "model.safetensors")
    base = "model.layers.1.self_attn.k_proj"
    tensors[f"{base}.weight"] = np.zeros((tensors[f"{base}.weight"].shape[0], 256), np.float16)
    del tensors[f"{base}.scales"], tensors[f"{base}.biases"]
    save_file(tensors, root / "model.safetensors")
    source = open_source(BuildOptions(str(root), tmp_path / "out"))
    assert source.matrices["layers.1.qkv"].bits == 16
    (dense,) = (each["reason"] for each in source.report.dense if each["name"] == "layers.1.qkv")
    assert dense == f"computed together with {base}.weight, which the checkpoint has as floats"
    assert source.report.anew == {("MLX q4 in groups of 64", "float16"): 2}


def test_a_missing_part_is_named(converted: Path, tmp_path: Path) -> None:
    root = changed(converted, tmp_path / "x")
    tensors = load_file(root / "model.safetensors")
    del tensors["model.embed_tokens.biases"]
    save_file(tensors, root / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model.embed_tokens.biases \[2048, 4\]"):
        open_source(BuildOptions(str(root), tmp_path / "out"))
