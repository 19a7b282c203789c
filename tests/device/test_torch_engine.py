"""The torch engine on the CPU, without its process: tokens equal those of transformers, and do not depend on
concurrent requests.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import CheckpointError, RequestError
from nearfar.fallback_server.backend import EmbedRequest, Sampling, TokenRequest
from nearfar.fallback_server.torch_engine.messages import Cancel, Embedded, EmbedSequence
from nearfar.fallback_server.torch_engine.options import TorchOptions
from tests.shared_data import shared_data
from tests.support.late import late
from tests.support.torch_rig import GREEDY, Rig

torch, transformers = late("torch"), late("transformers")
graphs = late("nearfar.fallback_server.torch_engine.graphs")
models = late("nearfar.fallback_server.torch_engine.model")
native = late("nearfar.fallback_server.torch_engine.native")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: more threads than free cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stories() -> Path:
    return shared_data("models", "stories260K")


def mixed(count: int, seed: int = 0, **options: Any) -> list[TokenRequest]:
    """Requests of many kinds: lengths, sampling, penalties, logprobs."""
    r = random.Random(seed)
    samplings = [
        GREEDY,
        Sampling(seed=11, temperature=0.8, top_p=0.9),
        Sampling(seed=12, top_k=20, repetition_penalty=1.3),
        Sampling(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.3),
        Sampling(seed=13, min_p=0.05, logit_bias={5: 2.0, 9: -100.0}),
    ]
    return [
        TokenRequest(
            f"r{i}",
            (1, *(r.randrange(3, 512) for _ in range(r.choice([0, 3, 17, 40, 90, 150])))),
            r.randint(1, 40),
            samplings[i % len(samplings)],
            logprobs=2 if i % 3 == 0 else None,
            priority=i % 2,
            **options,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("native", [True, False])
def test_golden_text(stories: Path, native: bool) -> None:
    (tokens,) = Rig(stories, native=native).tokens([TokenRequest("a", (1,), 199, GREEDY)])
    text = transformers.AutoTokenizer.from_pretrained(stories).decode(tokens)
    assert text == (stories / "golden_greedy.txt").read_text()


@pytest.mark.parametrize("native", [True, False])
def test_together_as_alone(stories: Path, native: bool) -> None:
    requests = mixed(20)
    together = Rig(stories, native=native, max_running=8, token_budget=48)
    found = together.tokens(requests)
    together.assert_empty()
    for request, tokens in zip(requests, found, strict=True):
        assert tokens == Rig(stories).tokens([request])[0], request


@pytest.mark.parametrize("native", [True, False])
def test_decode_steps_in_fixed_shapes(stories: Path, native: bool) -> None:
    """Runs the steps eagerly that CUDA graphs would replay."""
    requests = mixed(10)
    rig = Rig(stories, native=native)
    rig.engine._graphs = graphs.DecodeGraphs(rig.engine.model, rig.engine.cache, capture=False)
    assert rig.tokens(requests) == Rig(stories).tokens(requests)
    assert len(rig.engine._graphs._shapes) >= 3


def test_a_fixed_shape_that_does_not_fit_the_memory_is_given_up(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed(4)
    rig = Rig(stories)
    made = rig.engine._graphs = graphs.DecodeGraphs(rig.engine.model, rig.engine.cache, capture=True)

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made, "_forward", full)
    assert rig.tokens(requests) == Rig(stories).tokens(requests)
    assert not made._shapes


def test_one_long_sequence_does_not_pad_all_others(stories: Path) -> None:
    rig = Rig(stories)
    rig.engine._graphs = made = graphs.DecodeGraphs(rig.engine.model, rig.engine.cache, capture=False)
    long = TokenRequest("long", (1, *(3 + i % 200 for i in range(200))), 8, GREEDY)
    short = [TokenRequest(f"short-{i}", (1, 5 + i), 8, GREEDY) for i in range(7)]
    assert rig.tokens([long, *short]) == Rig(stories).tokens([long, *short])
    assert not made._shapes  # room for 8 rows of 16 pages, where 20 pages are needed


def test_a_prefix_is_found_again_and_changes_nothing(stories: Path) -> None:
    prompt = (1, *range(3, 103))
    rig = Rig(stories)
    requests = [TokenRequest(str(i), (*prompt, 200 + i), 20, GREEDY) for i in range(3)]
    first = rig.run(requests[:1])[0]
    later = rig.run(requests[1:])
    assert first[0].cached_tokens == 0
    assert [events[0].cached_tokens for events in later] == [96, 96]  # six pages of 16 tokens are cached
    counters = rig.engine.counters
    assert (counters.prefix_hits, counters.prefix_queries) == (192, 3 * 102)
    for request, events in zip(requests[1:], later, strict=True):
        assert [event.token for event in events] == Rig(stories).tokens([request])[0]


def test_preemption_gives_the_same_tokens(stories: Path) -> None:
    requests = [TokenRequest(str(i), (1, *range(3 + i, 23 + i)), 60, Sampling(seed=i)) for i in range(6)]
    small = Rig(stories, pages=14, max_running=6)
    found = small.tokens(requests)
    assert small.engine.counters.preemptions > 0
    small.assert_empty()
    assert found == Rig(stories).tokens(requests)


def test_cancelling_at_any_point_frees_everything(stories: Path) -> None:
    alone = Rig(stories).tokens([TokenRequest("stays", (1, 5, 6), 30, GREEDY)])[0]
    for turns in range(6):
        rig = Rig(stories, token_budget=64)
        for request in mixed(6):
            rig.submit(request)
        rig.submit(TokenRequest("stays", (1, 5, 6), 30, GREEDY))
        for _ in range(turns):
            rig.engine.turn()
        for i in range(6):
            rig.engine.handle(Cancel(f"r{i}"))
        rig.run([])
        assert [event.token for event in rig.events("stays")] == alone
        rig.assert_empty()


def test_long_chunks_are_masked_in_pieces(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [TokenRequest(str(n), (1, *range(3, n)), 10, GREEDY) for n in (400, 150)]
    want = Rig(stories).tokens(requests)
    monkeypatch.setattr("nearfar.fallback_server.torch_engine.cache.MASK_SIZE", 5000)
    assert Rig(stories, token_budget=128).tokens(requests) == want


def test_a_seed_is_a_text(stories: Path) -> None:
    def texts(seeds: list[int], **options: Any) -> list[list[int | None]]:
        return Rig(stories, **options).tokens(
            [TokenRequest(str(i), (1,), 30, Sampling(seed=seed)) for i, seed in enumerate(seeds)]
        )

    first = texts([7, 8, 7])
    assert first[0] == first[2] != first[1]
    assert texts([8, 7], max_running=1) == [first[1], first[0]]


def test_logprobs_are_transformers(stories: Path) -> None:
    prompt = (1, *range(30, 60))
    requests = [
        TokenRequest("p", prompt, 8, GREEDY, logprobs=3, prompt_logprobs=2),
        TokenRequest("q", prompt, 8, Sampling(seed=1), logprobs=0),
    ]
    rig = Rig(stories, max_running=4, token_budget=16)  # the prompt is read in chunks
    events, drawn = rig.run(requests)
    reference = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    for answer in (events, drawn):
        full = [*prompt, *(event.token for event in answer)]
        with torch.no_grad():
            want = torch.log_softmax(reference(torch.tensor([full])).logits[0], 1)
        for index, event in enumerate(answer):
            row = want[len(prompt) + index - 1]
            assert event.logprob == pytest.approx(row[event.token].item(), abs=1e-3)
            assert [entry.logprob for entry in event.top] == pytest.approx(
                row.topk(len(event.top)).values.tolist(), abs=1e-3
            )
    given = events[0].prompt_logprobs
    assert given is not None
    assert len(given) == len(prompt)
    assert given[0] is None
    for index, entry in enumerate(given[1:], 1):
        assert entry is not None
        assert entry[0].token == prompt[index]
        assert entry[0].logprob == pytest.approx(want[index - 1, prompt[index]].item(), abs=1e-3)
        assert len(entry[1]) == 2
    assert drawn[0].prompt_logprobs is None
    assert events[1].prompt_logprobs is None


def test_the_end_token_the_limit_and_min_tokens(stories: Path) -> None:
    plain = Rig(stories).tokens([TokenRequest("a", (1,), 20, GREEDY)])[0]
    stop = plain[9]
    assert stop is not None
    first = plain.index(stop)
    rig = Rig(stories)
    ended, longer, full = rig.run(
        [
            TokenRequest(
                "stop", (1,), 20, GREEDY, stop_token_ids=frozenset({stop, 10**9, *range(600, 10_000)})
            ),
            TokenRequest("min", (1,), 20, GREEDY, stop_token_ids=frozenset({stop}), min_tokens=20),
            TokenRequest("full", (1, *range(3, 503)), 10_000, GREEDY),
        ]
    )
    assert [event.token for event in ended] == plain[: first + 1]
    assert [event.finish for event in ended] == [None] * first + ["stop"]
    assert stop not in [event.token for event in longer]
    assert (len(longer), longer[-1].finish) == (20, "length")
    assert (len(full), full[-1].finish) == (512 - 501, "length")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_grammars_beside_free_text(stories: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(stories)
    free = TokenRequest("free", (1,), 60, GREEDY)
    kinds = {
        "schema": Grammar("json_schema", json.dumps(SCHEMA)),
        "regex": Grammar("regex", r"[0-9]{3}-[a-f]{2}"),
        "ebnf": Grammar("ebnf", 'root ::= "yes" | "no"'),
    }
    rig = Rig(stories)
    ends = frozenset({2})
    requests = [
        TokenRequest(name, (1,), 450, Sampling(seed=3), grammar=grammar, stop_token_ids=ends, logprobs=1)
        for name, grammar in kinds.items()
    ]
    for request in requests:
        rig.submit(request)
    rig.run([free])
    rig.engine.close()
    text = {}
    for name in kinds:
        events = rig.events(name)
        assert events[-1].finish == "stop", name
        tokens = [event.token for event in events if event.token is not None]
        text[name] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    answer = json.loads(text["schema"])
    assert set(answer) == {"name", "age"}
    assert 0 <= answer["age"] <= 99
    assert len(text["regex"]) == 6
    assert text["ebnf"] in ("yes", "no")
    assert [event.token for event in rig.events("free")] == Rig(stories).tokens([free])[0]
    rig.assert_empty()


BAD: dict[str, dict[str, Any]] = {
    "empty": {"tokens": ()},
    "above the vocabulary": {"tokens": (1, 512)},
    "negative": {"tokens": (-1,)},
    "not a number": {"tokens": (1, 2.0)},
    "longer than the context": {"tokens": (1,) * 512},
    "no tokens wanted": {"max_tokens": 0},
    "temperature below 0": {"sampling": Sampling(temperature=-1.0)},
    "temperature NaN": {"sampling": Sampling(temperature=math.nan)},
    "temperature infinite": {"sampling": Sampling(temperature=math.inf)},
    "top_p NaN": {"sampling": Sampling(top_p=math.nan)},
    "top_p 0": {"sampling": Sampling(top_p=0.0)},
    "penalty 0": {"sampling": Sampling(repetition_penalty=0.0)},
    "bias out of vocabulary": {"sampling": Sampling(logit_bias={512: 1.0})},
    "bias NaN": {"sampling": Sampling(logit_bias={1: math.nan})},
    "seed too large": {"sampling": Sampling(seed=2**64)},
    "too many logprobs": {"logprobs": 10**6},
    "too many prompt logprobs": {"prompt_logprobs": 10**6},
    "priority without end": {"priority": 10**12},
    "long grammar": {"grammar": Grammar("regex", "a" * 10**6)},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused(stories: Path, case: str) -> None:
    rig = Rig(stories)
    with pytest.raises(RequestError):
        rig.submit(TokenRequest(**({"id": "bad", "tokens": (1,), "max_tokens": 5} | BAD[case])))
    assert not rig.engine.busy


@pytest.mark.parametrize("native", [True, False])
def test_odd_requests_beside_healthy_ones(stories: Path, native: bool) -> None:
    """Unusual but allowed requests, and a row whose logits are not finite, do not change the tokens of other
    requests.
    """
    healthy = [
        TokenRequest("heir", (1,), 8, GREEDY),
        *mixed(7),
    ]  # the first request takes over the page of the broken one
    odd = [
        TokenRequest("top_k", (1,), 20, Sampling(seed=1, top_k=10**9)),
        TokenRequest("cold", (1,), 20, Sampling(seed=1, temperature=1e-30)),
        TokenRequest("hot", (1,), 20, Sampling(seed=1, temperature=100.0)),
        TokenRequest("stops", (1,), 20, GREEDY, stop_token_ids=frozenset(range(10_000)), min_tokens=20),
        TokenRequest("nan", (1, 400, 401), 20, GREEDY),
    ]
    rig = Rig(stories, native=native)
    forward = rig.engine.model.forward

    def broken(batch: Any, rows: torch.Tensor) -> torch.Tensor:
        """Poison the keys and values as a model that overflows would, and the logits of that row."""
        logits = forward(batch, rows)
        row = 0
        for chunk in batch.chunks:
            row += chunk.count
            if chunk.work.id == "nan":
                logits[rows == row - 1] = math.nan
                for tensor in (*rig.engine.cache.keys, *rig.engine.cache.values):
                    tensor[list(chunk.pages)] = math.nan
        return logits

    rig.engine.model = type("Broken", (), {"forward": staticmethod(broken), "facts": rig.engine.model.facts,
                                          "device": rig.engine.model.device})()  # fmt: skip
    found = rig.run(odd[-1:]) + rig.run([*healthy, *odd[:-1]])
    again = rig.run([TokenRequest(f"again-{request.id}", request.tokens, request.max_tokens, request.sampling)
                     for request in healthy])  # fmt: skip
    assert [(event.token, event.finish) for event in found[0]] == [(None, "abort")]
    want = Rig(stories).tokens(healthy)
    assert [[event.token for event in events] for events in found[1:9]] == want
    assert [[event.token for event in events] for events in again] == want
    assert all(events[-1].finish in ("length", "stop") for events in found[1:])
    rig.assert_empty()


def test_embeddings_are_transformers(stories: Path) -> None:
    rig = Rig(stories)
    rig.submit(TokenRequest("beside", (1,), 5, GREEDY))
    for pooling in ("mean", "last"):
        rig.engine.handle(EmbedSequence(EmbedRequest(pooling, (1, 20, 30, 40), pooling)))
    rig.run([])
    given = {message.id: message.values for message in rig.said if isinstance(message, Embedded)}
    reference = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    with torch.no_grad():
        hidden = reference.model(torch.tensor([[1, 20, 30, 40]])).last_hidden_state[0]
    assert given["mean"] == pytest.approx(hidden.mean(0).tolist(), abs=1e-4)
    assert given["last"] == pytest.approx(hidden[-1].tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def kernel() -> native.NativeDecode:
    compiled = native.compile_decode()
    if compiled is None:
        pytest.skip("needs a C++ compiler")
    return compiled


@pytest.mark.parametrize("name", ["float32", "bfloat16"], ids=["dtype0", "dtype1"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dims", [(24, 40), (64, 64), (128, 128)])
def test_the_decode_kernel_is_dense_attention(
    kernel: native.NativeDecode, name: str, window: int | None, dims: tuple[int, int]
) -> None:
    dtype, generator = getattr(torch, name), torch.Generator().manual_seed(0)
    rows, heads, kv_heads, (dim, value_dim), size, width = 5, 6, 2, dims, 16, 6

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    keys, values = draw(64, size, kv_heads, dim), draw(64, size, kv_heads, value_dim)
    q = draw(heads, rows, dim).transpose(0, 1)  # the shape in which models pass q
    pages = torch.randperm(64, generator=generator)[: rows * width].view(rows, width)
    lengths = torch.tensor([1, 17, 96, 64, 33])
    out = torch.empty(rows, heads, value_dim, dtype=dtype)
    kernel(q, keys, values, pages, lengths, 0.3, window, out)
    for row in range(rows):
        length = int(lengths[row])
        first = max(0, length - window) if window else 0
        k = keys[pages[row]].flatten(0, 1)[first:length].float().repeat_interleave(heads // kv_heads, 1)
        v = values[pages[row]].flatten(0, 1)[first:length].float().repeat_interleave(heads // kv_heads, 1)
        weights = torch.softmax(torch.einsum("hd,lhd->hl", q[row].float(), k) * 0.3, 1)
        want = torch.einsum("hl,lhd->hd", weights, v)
        torch.testing.assert_close(
            out[row].float(), want, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=1e-5
        )
    keys[pages[2, 3], 5] = math.nan  # the position is 53 of the third row
    kernel(q, keys, values, pages, lengths, None, window, out)
    broken = torch.isnan(out).any(-1).any(-1).tolist()
    # a window of 20 positions does not reach back to the broken one
    assert broken == [False, False, window is None, False, False]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("window", [None, 24])
def test_another_architecture_and_sliding_windows(tmp_path: Path, window: int | None, native: bool) -> None:
    """Qwen3 with random weights, with and without a window, in chunks of 16: tokens equal those of
    transformers' generate.
    """
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        use_sliding_window=window is not None,
        sliding_window=window or 4096,
        max_window_layers=1,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    requests = [
        TokenRequest(str(n), tuple((7 * i + n) % 300 for i in range(n)), 30, GREEDY) for n in (1, 20, 70)
    ]
    found = Rig(tmp_path, native=native, max_running=4, token_budget=16).tokens(requests)
    for request, tokens in zip(requests, found, strict=True):
        want = reference.generate(
            torch.tensor([request.tokens]), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert tokens == want[0, len(request.tokens) :].tolist()


def test_models_that_attend_in_their_own_way_are_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(CheckpointError, match=r"attention|attend"):
        models.load_model(tmp_path, TorchOptions(device="cpu"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.load_model(tmp_path / "absent", TorchOptions(device="cpu"))


def test_a_checkpoint_without_a_head_is_refused_and_nothing_is_reported_beside(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would fill the head with random numbers, and log a table of missing weights."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=r"has no lm_head\.weight.*nearfar build --embeddings"):
        models.load_model(tmp_path, TorchOptions(device="cpu"))
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_a_config_that_breaks_transformers_is_one_sentence(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 1,
              "intermediate_size": 8, "num_hidden_layers": 1, "pad_token_id": 50256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"transformers cannot load .*: ") as refused:
        models.load_model(tmp_path, TorchOptions(device="cpu"))
    assert "\n" not in str(refused.value)


def test_bfloat16(stories: Path) -> None:
    loaded = models.load_model(stories, TorchOptions(device="cpu", dtype="bfloat16"))
    assert loaded.dtype == torch.bfloat16
