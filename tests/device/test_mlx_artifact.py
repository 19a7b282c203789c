"""The mlx artifact in mlx-lm as it is, and its exported step in a process without any model code."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.weights.quantize import Scheme, quantize
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.format.manifest_file import schema
from tests.shared_data import shared_data
from tests.support.late import late
from tests.support.paths import ROOT

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
mlx_lm = late("mlx_lm", reason="mlx-lm is not installed")

SAMPLE = ROOT / "examples" / "sample-model"
GOLDEN_TOKENS = 199
QUIET = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


# The steps of an app, in mlx alone: prefill, then one token at a time.
RUN = """
    import json, pathlib, sys
    sys.path.insert(0, sys.argv[1])
    import mlx.core as mx
    for name in ("nearfar", "mlx_lm", "transformers", "numpy", "torch"):
        try:
            __import__(name)
        except ImportError:
            continue
        raise AssertionError(f"{name} can be imported")
    root, prompt, count = pathlib.Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    step, about = mx.import_function(str(root / "step.mlxfn"), return_metadata=True)
    about = json.loads(about)
    weights = mx.load(str(root / "model.safetensors"))
    dtype = getattr(mx, about["dtype"])
    cached = mx.zeros((1, 0), mx.int32)
    cache = [mx.zeros((1, c["kv_heads"], 0, c["head_dim"]), dtype) for c in about["caches"] for _ in "kv"]
    tokens, answer, position = prompt, [], 0
    while len(answer) < count:
        positions = mx.arange(position, position + len(tokens), dtype=mx.int32)[None]
        rows = mx.array([[len(tokens) - 1]], mx.int32)
        inputs = mx.array([tokens], mx.int32), positions, rows, cached, *cache
        logits, cached, *cache = step(inputs, weights)
        mx.eval(logits, cached, cache)
        position += len(tokens)
        tokens = [mx.argmax(logits[0, 0]).item()]
        answer += tokens
    print(json.dumps(answer))
"""


def make(checkpoint: Path, out: Path, quant: str, **options: bool) -> Path:
    return build(BuildOptions(str(checkpoint), out, targets=("mlx",), quant=quant, **options))[0]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = shared_data("models", "stories260K")
    return make(checkpoint, tmp_path_factory.mktemp("stories"), "none", export_function=True)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(SAMPLE, tmp_path_factory.mktemp("sample"), "q4", export_function=True)


def golden() -> str:
    return shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8").strip()


def greedy(root: Path, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of mlx-lm."""
    from mlx_lm.generate import generate_step

    model, _ = mlx_lm.load(str(root))
    return [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=count)]


def text_of(root: Path, ids: list[int]) -> str:
    _, tokenizer = mlx_lm.load(str(root), lazy=True)
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def test_mlx_lm_gives_the_golden_text(stories: Path) -> None:
    bos = json.loads((stories / "config.json").read_text())["bos_token_id"]
    assert text_of(stories, greedy(stories, [bos], GOLDEN_TOKENS)) == golden()


def test_the_directory_is_what_mlx_loaders_look_for(sample: Path) -> None:
    names = {path.name for path in sample.iterdir()}
    assert {path for path in names if path.endswith(".safetensors")} == {"model.safetensors"}
    assert {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "LICENSE",
    } <= names
    assert not [path for path in sample.iterdir() if path.is_dir()]
    config = json.loads((sample / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == {"group_size": 64, "bits": 4}
    tensors, metadata = mx.load(str(sample / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == mx.uint32
    assert tensors["model.norm.weight"].dtype == mx.float16
    assert not [name for name in tensors if name.startswith("layers")]


def test_the_manifest_follows_the_schema(stories: Path, sample: Path) -> None:
    for root in (stories, sample):
        manifest = json.loads((root / "manifest.json").read_text())
        jsonschema.Draft202012Validator(schema()).validate(manifest)
        assert manifest["target"] == "mlx"
        assert [program["name"] for program in manifest["programs"]] == ["f16", "f32"]
        weights = manifest["weights"]
        assert weights["bytes"] == sum((root / shard["file"]).stat().st_size for shard in weights["shards"])


@pytest.mark.parametrize("quant", ["q2", "q3", "q8"])
def test_mlx_reads_exactly_the_weights_that_were_quantized(quant: str, tmp_path: Path) -> None:
    root = make(SAMPLE, tmp_path, quant)
    tensors = mx.load(str(root / "model.safetensors"))
    name, scheme = "model.layers.1.mlp.down_proj", Scheme.parse(quant)
    packed, scales, biases = (tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    found = np.array(mx.dequantize(packed, *wide, group_size=64, bits=scheme.bits))
    original = mx.load(str(SAMPLE / "model.safetensors"))[f"{name}.weight"].astype(mx.float32)
    tensor = quantize(np.array(original), scheme)
    affine = (np.repeat(part.astype(np.float32), 64, axis=1) for part in (tensor.scales, tensor.biases))
    scale, bias = affine
    # a float16 scale times a code of 8 bits is exact in float32: there is one rounding and one right answer
    np.testing.assert_array_equal(found, scale * tensor.codes + bias)
    assert len(greedy(root, [0, 5, 9], 4)) == 4


def nearfar(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearfar", *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_inspect(sample: Path, stories: Path) -> None:
    shown = nearfar("inspect", sample, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    half, single = report["programs"]
    tensors = mx.load(str(sample / "model.safetensors"))
    assert half["weight_bytes_per_token"] == sum(array.nbytes for array in tensors.values())
    wide = sum(array.nbytes for array in tensors.values() if array.dtype == mx.float16)
    assert single["weight_bytes_per_token"] == half["weight_bytes_per_token"] + wide
    assert half["launches_per_token"] is None
    assert report["memory"]["f32"]["1024"] > report["memory"]["f16"]["1024"]
    readable = nearfar("inspect", stories)
    assert readable.returncode == 0, readable.stderr
    for word in ("MLX's own kernels", "needs metal", "1 safetensors file", "of weights read", "512 tokens"):
        assert word in readable.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--target", "cpu,mlx", "--group-size", "16"], "target mlx has no kernels for groups of 16"),
        (["--target", "cpu", "--export-function"], "--export-function is for target mlx"),
    ],
)
def test_what_other_targets_cannot_do_is_said(args: list[str], said: str, tmp_path: Path) -> None:
    done = nearfar("build", SAMPLE, *args, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())
    assert not list(tmp_path.rglob("*.json"))


def test_the_same_input_gives_the_same_bytes(sample: Path, tmp_path: Path) -> None:
    again = make(SAMPLE, tmp_path, "q4")
    for file in again.iterdir():
        if file.name != "manifest.json":
            assert file.read_bytes() == (sample / file.name).read_bytes(), file.name
    before, after = (json.loads((root / "manifest.json").read_text()) for root in (sample, again))
    own = {"function": None, "manifest_sha256": None}
    assert {**before, **own} == {**after, **own}


def test_generate_as_a_command(sample: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mlx_lm",
        "generate",
        "--model",
        str(sample),
        "--prompt",
        "Tell me about the fox.",
    ]
    done = subprocess.run(
        [*command, "--max-tokens", "12", "--temp", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        env=QUIET,
    )
    assert done.returncode == 0, done.stderr
    assert "Generation: " in done.stdout
    answer = done.stdout.split("==========")[1].strip()
    assert answer
    assert answer.isprintable() or "\n" in answer


def test_server_answers_over_http(sample: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(sample), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=QUIET)
    try:
        _wait_for(port, server)
        body = {
            "messages": [{"role": "user", "content": "Tell me about the fox."}],
            "max_tokens": 8,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    finally:
        server.terminate()
        server.wait(20)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["message"]["content"].strip()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert server.poll() is None, "mlx_lm server ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("mlx_lm server did not listen")


# The exporter as a Mac user calls it, where TVM is not installed.
BLOCKED = """
import runpy, sys
sys.modules["tvm"] = None
runpy.run_module("nearfar.build.targets.mlx_function", run_name="__main__")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for imports that has only mlx."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "mlx").symlink_to(Path(next(iter(__import__("mlx").__path__))))
    return folder


def run(bare: Path, root: Path, prompt: list[int], count: int) -> list[int]:
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        textwrap.dedent(RUN),
        str(bare),
        str(root),
        json.dumps(prompt),
        str(count),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=bare, env={})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_golden_text_without_model_code(stories: Path, bare: Path) -> None:
    bos = json.loads((stories / "config.json").read_text())["bos_token_id"]
    assert text_of(stories, run(bare, stories, [bos], GOLDEN_TOKENS)) == golden()


def test_a_quantized_model_gives_what_mlx_lm_gives(sample: Path, bare: Path) -> None:
    prompt = [0, 17, 350, 60, 41, 1200]
    assert run(bare, sample, prompt, 24) == greedy(sample, prompt, 24)


def test_sequences_of_different_lengths_in_one_step(stories: Path) -> None:
    step = mx.import_function(str(stories / "step.mlxfn"))
    weights = mx.load(str(stories / "model.safetensors"))
    caches = json.loads((stories / "manifest.json").read_text())["caches"]
    prompts = [[1, 403, 407, 261], [1, 378], [1, 400, 300, 301, 302, 303, 304]]

    def empty(batch: int) -> list[mx.array]:
        return [mx.zeros((batch, cache["kv_heads"], 0, cache["head_dim"])) for cache in caches for _ in "kv"]

    def logits(
        rows: list[list[int]], positions: list[list[int]], take: list[list[int]], state: list[mx.array]
    ) -> list:
        ints = [mx.array(values, mx.int32) for values in (rows, positions, take)]
        return step((*ints, *state), weights)

    longest = max(map(len, prompts))
    tokens = [[7] * (longest - len(p)) + p for p in prompts]  # padded on the left
    positions = [[-1] * (longest - len(p)) + list(range(len(p))) for p in prompts]
    state = [mx.zeros((3, 0), mx.int32), *empty(3)]
    both = [[longest - 1, longest - 2]] * 3
    out, *state = logits(tokens, positions, both, state)
    again, *state = logits([[5], [6], [0]], [[4], [2], [-1]], [[0]] * 3, state)  # the third sequence pauses
    last, *_ = logits([[9], [8], [11]], [[5], [3], [7]], [[0]] * 3, state)
    for i, (prompt, more) in enumerate(zip(prompts, ([5, 9], [6, 8], [11]), strict=True)):
        row = [*prompt, *more]
        alone, *_ = logits(
            [row], [list(range(len(row)))], [list(range(len(row)))], [mx.zeros((1, 0), mx.int32), *empty(1)]
        )
        assert mx.allclose(out[i, 0], alone[0, len(prompt) - 1], atol=1e-4)
        assert mx.allclose(out[i, 1], alone[0, len(prompt) - 2], atol=1e-4)
        assert mx.allclose(last[i, 0], alone[0, -1], atol=1e-4)
    assert mx.allclose(
        again[0, 0],
        logits([[*prompts[0], 5]], [[0, 1, 2, 3, 4]], [[4]], [mx.zeros((1, 0), mx.int32), *empty(1)])[0][
            0, 0
        ],
        atol=1e-4,
    )


def test_written_again_from_the_artifact_alone(stories: Path, bare: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stories, tmp_path / "mlx")
    (copy / "step.mlxfn").unlink()
    command = [sys.executable, "-c", BLOCKED, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert run(bare, copy, [1, 403], 8) == run(bare, stories, [1, 403], 8)
    before, after = (json.loads((root / "manifest.json").read_text()) for root in (stories, copy))
    assert after["function"]["sha256"] == hashlib.sha256((copy / "step.mlxfn").read_bytes()).hexdigest()
    own = {"function": None, "manifest_sha256": None}
    assert {**before, **own} == {**after, **own}
    Artifact.open(copy).verify()


def test_the_cpp_of_the_documentation(stories: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "step.cpp"
    source.write_text((ROOT / "docs" / "mac.md").read_text().split("```cpp\n")[1].split("```")[0])
    folder = Path(next(iter(__import__("mlx").__path__)))
    paths = [f"-I{folder}/include", f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib"]
    made = subprocess.run(
        [compiler, "-std=c++20", str(source), *paths, "-lmlx", "-o", str(tmp_path / "step")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([str(tmp_path / "step"), str(stories)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert text_of(stories, [int(token) for token in ran.stdout.split()]) == golden()
