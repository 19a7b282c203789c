"""Embedding models: vectors equal those of transformers (last token, normalized) on every kind of device."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.errors import CheckpointError, RequestError
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from nearfar.kernels.buckets import Buckets
from tests.support.architectures import CASES, checkpoint, prompt
from tests.support.backends import executor, require
from tests.support.browser import browser, new_page, serve
from tests.support.late import late
from tests.support.paths import WEB, node
from tests.support.servers import RunningServer

openai = late("openai")

Vectors = npt.NDArray[Any]
CASE = next(case for case in CASES if case.model_type == "qwen3")
TOLERANCE = {"f32": 1e-4, "f16": 1e-2}
"""Tolerance of vectors of length 1, where the weights are as in the checkpoint; CPU has that of the cpu."""
CPU = 1e-3
"""On the cpu, matmuls of many rows are computed in 16-bit fixed point."""
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LAST = {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def embedding_checkpoint(root: Path, pooling: dict[str, Any] = LAST) -> Path:
    """The case saved like Qwen3-Embedding: sentence-transformers' files, no head, names without `model.`, and
    a tokenizer that ends texts with the end token.
    """
    shutil.copytree(checkpoint(CASE), root)
    (root / "modules.json").write_text(json.dumps(MODULES))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    tensors = load_file(root / "model.safetensors")
    save_file(
        {name.removeprefix("model."): value for name, value in tensors.items() if name != "lm_head.weight"},
        root / "model.safetensors",
    )
    tokenizer = json.loads((root / "tokenizer.json").read_text())
    end = next(token for token in tokenizer["added_tokens"] if token["id"] == 257)["content"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [257], "tokens": [end]}},
    }
    (root / "tokenizer.json").write_text(json.dumps(tokenizer))
    return root


@cache
def reference() -> Any:
    """transformers' last hidden state of the last token, normalized: float32 [48]."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(
        checkpoint(CASE), dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def embed(tokens: list[int]) -> Vectors:
        with torch.no_grad():
            state = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return np.asarray(torch.nn.functional.normalize(state, dim=0).numpy())

    return embed


def build_one(target: str, source: Path, out: Path, **options: Any) -> Path:
    """Build for a target; gives the artifact."""
    build(
        BuildOptions(
            str(source), out, (target,), "none", buckets=Buckets((1, 16), (1,)),
            device_classes=("software",), cpu_features=("native",), **options,
        )
    )  # fmt: skip
    return out / target


@pytest.mark.parametrize("backend", ["cpu", "mlx-f32", "webgpu", "vulkan"])
def test_vectors_are_those_of_transformers(backend: str, tmp_path: Path) -> None:
    require(backend)
    target, _, precision = backend.partition("-")
    path = build_one(target, embedding_checkpoint(tmp_path / "source"), tmp_path)
    texts = [prompt(CASE, count) for count in (1, 9, 45, 40)]
    with Engine.load(path, kv_memory="4MB", precision=precision or None) as engine:
        made = engine.embeddings.create(texts)
        again = engine.embeddings.create(texts[2])
        close = CPU if target == "cpu" else TOLERANCE[executor(engine).precision]
        assert made.usage.prompt_tokens == made.usage.total_tokens == 95
        for index, (text, one) in enumerate(zip(texts, made.data, strict=True)):
            assert one.index == index
            assert np.abs(np.array(one.embedding) - reference()(text)).max() < close, len(text)
        assert np.abs(np.array(again.data[0].embedding) - reference()(texts[2])).max() < close


def test_what_is_asked_for_is_answered_as_openai_does(tmp_path: Path) -> None:
    path = build_one("cpu", embedding_checkpoint(tmp_path / "source"), tmp_path)
    with Engine.load(path, kv_memory="4MB") as engine:
        whole = engine.embeddings.create("hello")
        tokens = engine.embeddings.create([*engine.asynchronous.codec.encode_raw("hello"), 257])
        assert whole.usage.prompt_tokens == 6  # the tokenizer adds the end token
        assert whole.data[0].embedding == tokens.data[0].embedding
        vector = np.array(whole.data[0].embedding, np.float32)
        assert abs(np.linalg.norm(vector) - 1) < 1e-6
        short = engine.embeddings.create(["hello", "you"], dimensions=8)
        assert np.allclose(short.data[0].embedding, vector[:8] / np.linalg.norm(vector[:8]), atol=1e-6)
        coded = engine.embeddings.create("hello", encoding_format="base64").data[0].embedding
        assert isinstance(coded, str)
        assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), vector)
        for wrong, says in (
            (lambda: engine.embeddings.create("a", dimensions=49), "dimensions must be from 1 to 48, not 49"),
            (lambda: engine.embeddings.create([]), "input must have 1"),
            (
                lambda: engine.embeddings.create("a" * 160),
                "160 tokens, but the input has 161",
            ),
            (lambda: engine.embeddings.create("a", encoding_format="int8"), "'float' or 'base64'"),
            (lambda: engine.completions.create("a"), "gives embeddings and no text"),
        ):
            with pytest.raises(RequestError, match=says):
                wrong()


def test_any_decoder_gives_them_where_asked_to(tmp_path: Path) -> None:
    path = build_one("cpu", checkpoint(CASE), tmp_path, embeddings=True)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["model"]["task"] == "embed"
    assert not any(tensor["name"].startswith("lm_head") for tensor in manifest["weights"]["tensors"])
    text = prompt(CASE, 30)
    with Engine.load(path, kv_memory="4MB") as engine:
        made = np.array(engine.embeddings.create(text).data[0].embedding)
    assert np.abs(made - reference()(text)).max() < CPU


def test_a_model_that_writes_gives_none(tmp_path: Path) -> None:
    path = build_one("cpu", checkpoint(CASE), tmp_path)
    with (
        Engine.load(path, kv_memory="4MB") as engine,
        pytest.raises(RequestError, match=r"text and no embeddings: build .* --embeddings"),
    ):
        engine.embeddings.create("hello")


def test_another_pooling_is_refused(tmp_path: Path) -> None:
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    source = embedding_checkpoint(tmp_path / "source", mean)
    with pytest.raises(CheckpointError, match="pooling is mean_tokens; nearfar makes"):
        build_one("cpu", source, tmp_path)


def test_the_checkpoint_says_how_long_a_text_may_be(tmp_path: Path) -> None:
    source = embedding_checkpoint(tmp_path / "source")
    said = source / "sentence_bert_config.json"
    said.write_text(json.dumps({"max_seq_length": 24, "do_lower_case": False}))
    with Engine.load(build_one("cpu", source, tmp_path), kv_memory="4MB") as engine:
        assert engine.manifest.model.context_length == 24
        with pytest.raises(RequestError, match="24"):
            engine.embeddings.create(input=[7] * 25)
    said.write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(CheckpointError, match="do_lower_case"):
        build_one("cpu", source, tmp_path / "lower")


TEXTS = ["hello", "a much longer text, which takes more than one step of sixteen rows", "hello you"]


def expected(path: Path) -> Vectors:
    """transformers' vectors of the texts, with the end token that the tokenizer adds."""
    with Engine.load(path, kv_memory="4MB") as engine:
        return np.array([reference()(engine.asynchronous.codec.encode(text)) for text in TEXTS])


def test_in_node_by_the_engine_the_ai_sdk_and_the_openai_package(tmp_path: Path) -> None:
    if not (WEB / "dist" / "node" / "index.js").is_file():
        pytest.skip("the web package is not built (run `make setup`)")
    source = embedding_checkpoint(tmp_path / "source")
    wanted = expected(build_one("cpu", source, tmp_path))
    artifact = build_one("wasm", source, tmp_path)
    command = [node(), str(WEB / "test/hosts/embeddings.mjs"), str(WEB / "dist"), str(artifact)]
    made = subprocess.run(
        [*command, json.dumps(TEXTS)], capture_output=True, text=True, timeout=100, check=False
    )
    assert made.returncode == 0, made.stderr
    told: dict[str, Any] = json.loads(made.stdout)
    vectors = np.array([one["embedding"] for one in told["whole"]["data"]])
    assert np.abs(vectors - wanted).max() < CPU
    count = sum(len(text) for text in TEXTS) + len(TEXTS)
    assert told["whole"]["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert told["tokens"] == count
    for again in (told["many"], told["official"], [told["one"]]):
        assert np.abs(np.array(again) - vectors[: len(again)]).max() < 1e-6
    cut = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    assert np.abs(np.array(told["short"]) - cut).max() < 1e-6
    says = (
        "maximum context length is 160 tokens, but input 0 has 161",
        "from 1 to 48, not 49",
        "pooling",
        "embeddings and no text",
    )
    for message, said in zip(told["refused"], says, strict=True):
        assert said in str(message)


def test_in_chromium_as_in_python(tmp_path: Path) -> None:
    source = embedding_checkpoint(tmp_path / "source")
    wanted = expected(build_one("cpu", source, tmp_path))
    build_one("webgpu", source, tmp_path)
    ask = "return (await engine.embeddings.create({ input: argument })).data.map((one) => one.embedding);"
    with browser() as running, serve(tmp_path) as address:
        page = new_page(running, address).open()
        page.wait("idle")
        assert np.abs(np.array(page.run(ask, TEXTS)) - wanted).max() < TOLERANCE["f32"]


def test_served_at_v1_embeddings(tmp_path: Path) -> None:
    path = build_one("cpu", embedding_checkpoint(tmp_path / "source"), tmp_path)
    wanted = expected(path)

    async def opened() -> Any:
        return await open_engine([str(path)], "artifact", EngineOptions())

    server = RunningServer(opened)
    try:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="-", max_retries=0)
        name = client.models.list().data[0].id
        made = client.embeddings.create(model=name, input=TEXTS)
        assert np.abs(np.array([one.embedding for one in made.data]) - wanted).max() < CPU
        with pytest.raises(openai.BadRequestError, match="by the last token, not by the mean"):
            client.embeddings.create(model=name, input="a", extra_body={"pooling": "mean"})
        with pytest.raises(openai.BadRequestError, match="embeddings and no text"):
            client.completions.create(model=name, prompt="a", max_tokens=3)
        assert httpx.get(f"{server.address}/ready", timeout=20).status_code == 200
    finally:
        server.close()
