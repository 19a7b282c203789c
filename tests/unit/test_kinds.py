"""Models that do not write text token by token: each command names the kind of model and the alternatives
before anything is loaded; the known model types are those that transformers knows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nearfar.build.first_look import first_look
from nearfar.build.weights.gguf.config import read_config
from nearfar.build.weights.gguf.header import Header
from nearfar.errors import CheckpointError
from nearfar.fallback_server.engines import opening
from nearfar.fallback_server.torch_engine.options import require_checkpoint
from nearfar.step.causal import causal_types, encoder_decoder_types, not_causal, others_for
from nearfar.step.kinds import ENCODER_DECODERS, ENCODERS, TEXT_ALONE, torch_refuses, writes_no_text
from nearfar.step.models import NESTED, architectures, check_known
from tests.support import tiny
from tests.support.commands import nearfar

MINILM = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 384}
"""The config of all-MiniLM-L6-v2, as far as it matters here."""


def checkpoint(folder: Path, config: Mapping[str, Any] = MINILM) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights that nobody reads")
    return folder


@pytest.mark.parametrize(
    "command", ["run", "build", "serve", "serve --engine torch", "serve --engine artifact"]
)
def test_an_encoder_is_refused_before_it_is_loaded(command: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "all-MiniLM-L6-v2")
    more = {"run": ["hello"], "build": ["-o", tmp_path / "out"]}.get(command, ["--port", 0])
    words = command.split()
    barred = dict.fromkeys(("transformers", "tvm"))  # a module that is None in sys.modules cannot be imported
    with mock.patch.dict(sys.modules, barred), mock.patch("nearfar.cli.serve.run") as served:
        done = nearfar(words[0], model, *words[1:], *more, NEARFAR_HOME=str(tmp_path / "home"))
    said = " ".join(done.stderr.split())
    assert (done.returncode, served.called) == (1, False)
    assert said.startswith(f"error: {model}: config.json: model_type is 'bert', an encoder")
    assert "--embeddings" in said
    assert "nearfar serve tries" not in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5', an encoder with a decoder"),
        ({"model_type": "new", "is_encoder_decoder": True}, "is_encoder_decoder is true, so it is an"),
        ({"model_type": "bart"}, "'bart', an encoder with a decoder"),
        ({"model_type": "NomicBert"}, "'NomicBert', an encoder:"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True},
         "use_bidirectional_attention is true, so it is an encoder"),
        ({"model_type": "qwen2", "is_causal": False}, "is_causal is false, so it is an encoder"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
         "architectures is LlamaForSequenceClassification: it gives scores"),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}},
         "text_config.use_bidirectional_attention is true"),
    ],
)  # fmt: skip
def test_what_a_model_is(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The libraries' own functions raise the same messages as the commands."""
    model = checkpoint(tmp_path / "model", config)
    with pytest.raises(CheckpointError) as torch:
        require_checkpoint(model)
    assert said in str(torch.value)
    (model / "tokenizer.json").write_text("{}")
    assert said in (writes_no_text(config) or "")


OTHERS = (
    "clip", "sam", "vit", "wav2vec2", "siglip", "timm_wrapper", "llava", "gliner", "zzz", "whisper",
    "moss_transcribe_diarize",
)  # fmt: skip
"""Model types for images or sound, and unknown ones."""


@pytest.mark.parametrize("kind", OTHERS)
async def test_what_transformers_maps_to_no_causal_model_is_refused_in_one_sentence(
    kind: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model", {"model_type": kind})
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError) as refused:
        await opening.open_engine([str(model)], "torch", opening.EngineOptions())
    said = str(refused.value)
    assert said.startswith(f"{model}: config.json: ")
    assert "token by token" in said
    assert "\n" not in said
    assert len(said) < len(str(model)) + 500


async def test_a_pooling_that_cannot_be_followed_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path / "model", {"model_type": "qwen3"})
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    (model / "modules.json").write_text('[{"type": "a.Pooling", "path": "1_Pooling"}]')
    opened = mock.AsyncMock()
    monkeypatch.setattr(opening, "open_backend", opened)
    with pytest.raises(CheckpointError, match="pooled by cls_token; only the mean and the last token"):
        await opening.open_engine([str(model)], "torch", opening.EngineOptions())
    assert not opened.called


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    own = {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}
    with pytest.raises(CheckpointError, match="code of its own"):
        require_checkpoint(checkpoint(tmp_path / "model", own))


def test_the_table_of_transformers_is_read_as_it_is() -> None:
    from transformers.models.auto import modeling_auto as auto

    assert causal_types() == set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert encoder_decoder_types() >= set(auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)


async def test_of_a_repository_the_config_is_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = checkpoint(tmp_path / "model"), []
    monkeypatch.setattr(opening, "snapshot", lambda name, wanted, stop: asked.append(wanted) or model)
    with pytest.raises(CheckpointError, match="an encoder: it reads a text whole"):
        await opening.open_engine(["someone/minilm"], "torch", opening.EngineOptions())
    assert asked == [opening.LOOKED_AT]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "bert", "is_decoder": True, "architectures": ["BertLMHeadModel"]},
        {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
        {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        {},
    ],
)
def test_what_writes_text_is_left_alone(config: dict[str, Any]) -> None:
    assert writes_no_text(config) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": None}, None),
        ({"model_type": "mistral3", "vision_config": {"depth": 1}}, "no class for its text alone"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention"]}, "sinks"),
        ({"model_type": "mamba2", "state_size": 128}, "state_size"),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 1}}, "no class for its text alone"),
        ({"model_type": "gemma3", "vision_config": {"depth": 1}}, None),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "conv"),
        ({"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"]}}, "linear_attention"),
        ({"model_type": "granitemoehybrid", "mamba_d_state": 128, "layer_types": ["attention"]}, None),
        ({"model_type": "gpt_neox"}, None),
    ],
)
def test_what_pytorch_is_not_used_for(config: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    told = torch_refuses(config)
    assert (why or "") in (told or "")
    model = checkpoint(tmp_path / "model", config)
    if why is None:
        assert told is None
        require_checkpoint(model)
        return
    with pytest.raises(CheckpointError, match="leave --engine torch out"):
        require_checkpoint(model)
    if config["model_type"] not in {*architectures(), *NESTED}:
        with pytest.raises(CheckpointError, match="nearfar serve does not answer with it either"):
            check_known(config)


def test_a_gguf_file_of_an_encoder(tmp_path: Path) -> None:
    header = mock.Mock(spec=Header, file=tmp_path / "minilm.gguf")
    for name in ("bert", "nomic-bert", "modern-bert", "t5", "t5encoder"):
        header.metadata = {"general.architecture": name}
        with pytest.raises(
            CheckpointError, match=rf"minilm.gguf: general.architecture is '{name}', an encoder"
        ):
            read_config(header, {})


def test_the_types_are_those_that_transformers_knows() -> None:
    """A new encoder of transformers makes this test fail: add it to the list."""
    from transformers.models.auto import modeling_auto as auto

    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with_decoder = set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    masked = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) - with_decoder
    assert masked - ENCODERS == set()
    # this model type hears sound
    assert (with_decoder & causal) - ENCODER_DECODERS == {"moss_transcribe_diarize"}
    assert not (ENCODERS | ENCODER_DECODERS) & set(architectures())
    assert causal >= TEXT_ALONE


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt_neox"}, "nearfar serve tries it through transformers"),
        (
            {"model_type": "zzz"},
            "does not answer with it either, for the installed transformers knows no such",
        ),
        ({"model_type": "mamba2", "state_size": 128}, "does not answer with it either, for it has layers"),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 1}}, "does not answer with it either"),
    ],
)
def test_a_refusal_says_what_else_would_run_the_model(config: dict[str, Any], said: str) -> None:
    """The alternatives in the message must match the server's own answer to the same config."""
    assert said in others_for(config)
    answers = torch_refuses(config) is None and not_causal(config) is None
    assert answers is others_for(config).startswith("nearfar serve tries it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "relu"}, "nearfar serve tries it through transformers"),
        ({"hidden_act": "relu", "attn_logit_softcapping": 50.0}, "does not answer with it either"),
    ],
)
def test_a_setting_that_is_refused_is_no_dead_end(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", {**tiny.CONFIG, **change})
    with pytest.raises(CheckpointError, match=said):
        first_look(str(model))
