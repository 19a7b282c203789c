"""A Hugging Face causal language model with nearfar's attention: flat batches of rows in, logits of some rows
out.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nearfar.edge_runtime.engine.sampling_params import defaults_of
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.ends import end_tokens
from nearfar.errors import ArtifactError, CheckpointError, DeviceError
from nearfar.fallback_server.torch_engine.attention import NAME
from nearfar.fallback_server.torch_engine.cache import (
    Batch,
    KVCache,
    LayerShape,
    PagedStep,
    PrefillRows,
    build_batch,
    token_bytes,
)
from nearfar.fallback_server.torch_engine.native import NativeDecode, compile_decode
from nearfar.fallback_server.torch_engine.options import TorchOptions, require_checkpoint
from nearfar.fallback_server.torch_engine.sampling import step_bytes
from nearfar.fallback_server.torch_engine.scheduler import Work, WorkChunk
from nearfar.format.sampling import SamplingDefaults
from nearfar.format.sizes import pages_for
from nearfar.memory import host_memory

CACHE_SHARE = {"cpu": 0.4, "cuda": 0.85}
"""Fraction of the free memory that the cache takes by default."""
BF16_PARAMETERS = 30_000_000
"""Number of weights from which bfloat16 gains more than its casts cost, on a CPU with bfloat16 matrix
instructions. Measured with AMX, 16 rows: [768, 256] 53 µs in float32, 64 in bfloat16; [1536, 512] 353 and
119; [4096, 1024] 1665 and 932.
"""
PROBE_TOKENS = 24
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference of logits that rounding explains, relative to the largest logit."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the checkpoint. `context_length`: positions that the model computes without knowing the
    sequence's later length.
    """

    name: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    layers: tuple[LayerShape, ...]


class PagedModel:
    """The model on its device. `forward` runs a step over a cache; `forward_hidden` also returns the hidden
    states of its rows.
    """

    def __init__(
        self,
        model: Any,
        facts: ModelFacts,
        device: torch.device,
        dtype: torch.dtype,
        decode: NativeDecode | None,
    ) -> None:
        self.facts = facts
        self.device = device
        self.dtype = dtype
        self.decode = decode
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        self.nbytes = sum(parameter.nbytes for parameter in model.parameters())
        self._model = model
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Run a step and return logits float32 [R, vocab] of rows int64 [R]."""
        if batch.fresh is not None and batch.step.cache is not None:
            batch.step.cache.clear(batch.fresh)
        return self.logits(batch.tokens, batch.positions, batch.step, rows)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return logits float32 [R, vocab] of `rows` from the parts of a step: tokens and positions int64 [1,
        N].
        """
        keep: dict[str, Any] = {"logits_to_keep": rows} if self._keeps else {}
        with torch.inference_mode():
            out = self._model(
                input_ids=tokens, position_ids=positions, use_cache=False, paged_step=step, **keep
            )
            logits: torch.Tensor = out.logits[0] if self._keeps else out.logits[0, rows]
            return logits.float()

    def forward_hidden(self, batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of `forward`, and the last hidden states [N, hidden] of all rows."""
        kept: list[torch.Tensor] = []
        hook = self._model.base_model.register_forward_hook(
            lambda _module, _inputs, out: kept.append(out.last_hidden_state[0])
        )
        try:
            logits = self.forward(batch, rows)
        finally:
            hook.remove()
        return logits, kept[0]


def whole_sequence(
    tokens: Sequence[int], device: torch.device, shapes: dict[int, LayerShape] | None = None
) -> tuple[torch.Tensor, torch.Tensor, PagedStep]:
    """Return token ids and positions int64 [1, N], and the step, for one sequence that needs no cache."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    step = PagedStep(None, None, (), (PrefillRows(0, len(tokens), 0, none),), shapes)
    ids = torch.tensor([list(tokens)], dtype=torch.int64, device=device)
    return ids, torch.arange(len(tokens), device=device)[None], step


def load_model(path: Path, options: TorchOptions) -> PagedModel:
    """Load a checkpoint folder and check that nearfar's attention gives the same logits.

    Raises CheckpointError for a model whose layers do not all attend through transformers' attention
    interface, or whose logits change when they do; DeviceError for a device that does not exist.
    """
    require_checkpoint(path)
    device = _device(options)
    try:
        return _load(path, options, device)
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{path} does not fit the memory of {device}: {error}") from error


def _load(path: Path, options: TorchOptions, device: torch.device) -> PagedModel:
    try:
        config: Any = AutoConfig.from_pretrained(path)
        dtype = _dtype(options, device, config, path)
        with _without_report():
            found: Any = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an invalid config can raise any of Python's errors
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"transformers cannot load {path} as a causal language model: {told:.300}"
        ) from error
    model, loading = found
    if missing := sorted(loading["missing_keys"]):
        lacks = ", ".join(missing[:4]) + (" and more" if len(missing) > 4 else "")
        raise CheckpointError(
            f"{path} has no {lacks}, without which {type(model).__name__} writes no text: download it again, "
            "or build it for embeddings (nearfar build --embeddings)"
        )
    model.to(device).eval().requires_grad_(False)
    text = config.get_text_config()
    probe = [(index * 7919 + 1) % text.vocab_size for index in range(PROBE_TOKENS)]
    expected = _reference(model, probe, device)
    if device.type == "cpu" and dtype == torch.float32:
        _lay_out(model)
    layers = _take_over(model, text.num_hidden_layers, probe, device)
    facts = ModelFacts(
        options.name or path.resolve().name,
        expected.shape[1],
        _context(text, options),
        _eos(model, text, path),
        defaults_of(model.generation_config.to_dict()),
        layers,
    )
    decode = compile_decode() if device.type == "cpu" and options.native else None
    loaded = PagedModel(model, facts, device, dtype, decode)
    _check(loaded, probe, expected, options.page_size)
    return loaded


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of missing and unused weights. The parts that matter are errors of our
    own.
    """
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def make_cache(model: PagedModel, options: TorchOptions) -> KVCache:
    """Make a cache of the requested size, or of what the device's free memory and the model allow. Raises
    DeviceError for less than 2 pages.
    """
    per_page = token_bytes(model.facts.layers, model.dtype) * options.page_size
    usable = pages_for(model.facts.context_length, options.page_size) * options.max_running
    if options.cache_bytes is not None:
        pages = options.cache_bytes // per_page
    else:
        free = (
            torch.cuda.mem_get_info(model.device)[0]
            if model.device.type == "cuda"
            else host_memory().available
        )
        free = max(free - step_bytes(model.facts.vocab_size, options.max_running), 0)
        pages = min(int(free * CACHE_SHARE[model.device.type]) // per_page, usable)
    if pages < 2:
        raise DeviceError(
            f"the KV cache holds {pages} pages of {per_page} bytes: at least 2 are needed. Raise cache_bytes "
            f"(now {options.cache_bytes}) or free memory on {model.device}"
        )
    return KVCache(model.facts.layers, int(pages), options.page_size, model.dtype, model.device, model.decode)


def _device(options: TorchOptions) -> torch.device:
    cuda = torch.cuda.is_available()
    device = torch.device(("cuda" if cuda else "cpu") if options.device == "auto" else options.device)
    if device.type not in CACHE_SHARE or (device.type == "cuda" and not cuda):
        raise DeviceError(
            f"device {options.device!r} is not there: use 'auto', 'cpu' or, with a CUDA GPU, 'cuda'"
        )
    return device


def _dtype(options: TorchOptions, device: torch.device, config: Any, path: Path) -> torch.dtype:
    """Choose the dtype. On a CPU it is float32, unless the model is large and the CPU multiplies bfloat16
    matrices; on a GPU it is the checkpoint's.
    """
    if options.dtype != "auto":
        chosen = getattr(torch, options.dtype)
        assert isinstance(chosen, torch.dtype)
        return chosen
    stored = config.get_text_config().dtype or torch.float32
    if device.type == "cpu":
        large = (
            sum(file.stat().st_size for file in path.glob("*.safetensors")) / stored.itemsize
            >= BF16_PARAMETERS
        )
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if stored == torch.bfloat16 and large and fast else torch.float32
    return stored if stored.itemsize <= 2 else torch.bfloat16


def _lay_out(model: Any) -> None:
    """Store matrices by column. Measured on an AVX-512 CPU, 16 rows × [768, 256]: 53 µs by column, 84 µs by
    row.

    One row or hundreds take the same time either way. Looking up an embedding that is tied to the output
    layer gets slower (16 rows: 0.1 ms), which the output layer gains many times over (32,000 tokens × 512: 4
    ms).
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def _context(text: Any, options: TorchOptions) -> int:
    """The context length: the model's, but no longer than where its rotary frequencies start to depend on the
    longest row of the batch.
    """
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise CheckpointError(
            f"{text.model_type}'s config has no max_position_embeddings, which the context is taken from"
        )
    context = longest
    rope = getattr(text, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            context = min(context, int(part.get("original_max_position_embeddings") or context))
    return min(context, options.context_length or context)


def _eos(model: Any, text: Any, path: Path) -> tuple[int, ...]:
    """The end tokens that the configs name, and those of the tokenizer, where there is one."""
    found = model.generation_config.eos_token_id
    found = text.eos_token_id if found is None else found
    named = () if found is None else tuple(found) if isinstance(found, list | tuple) else (int(found),)
    if not (path / "tokenizer.json").is_file():
        return named
    try:
        codec = TextCodec.open_directory(path, None)
    except ArtifactError as error:
        raise CheckpointError(f"{error}: correct it, or download the checkpoint again") from error
    return end_tokens(codec, named, text.vocab_size)


def _reference(model: Any, probe: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return logits float32 [N, vocab] of the model as transformers runs it."""
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([list(probe)], device=device), use_cache=False).logits[
                0
            ]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{type(model).__name__} fails on a prompt of {len(probe)} tokens: {error}"
        ) from error
    return logits.float()


def _take_over(model: Any, layers: int, probe: Sequence[int], device: torch.device) -> tuple[LayerShape, ...]:
    """Switch the model to our attention, and check that every layer calls it once."""
    kind = type(model).__name__
    shapes: dict[int, LayerShape] = {}
    ids, positions, step = whole_sequence(probe, device, shapes)
    try:
        model.set_attn_implementation(NAME)
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, use_cache=False, paged_step=step)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{kind} does not run with another attention function: {error}") from error
    missing = sorted(set(range(layers)) - set(shapes))
    if missing or len(shapes) != layers:
        raise CheckpointError(
            f"{kind}: layers {missing} of {layers} do not attend through transformers' attention interface, "
            "so their cache cannot be paged. Serve this model by another engine (upstream: vLLM)"
        )
    return tuple(shapes[index] for index in range(layers))


def _check(model: PagedModel, probe: Sequence[int], expected: torch.Tensor, page_size: int) -> None:
    """Check that the paged logits equal transformers': in chunks, the last row as a decode step. Raises
    CheckpointError.
    """
    pages = pages_for(len(probe), page_size)
    cache = KVCache(model.facts.layers, pages, page_size, model.dtype, model.device, model.decode)
    work, cuts, found = Work("probe", list(probe)), [0, 11, len(probe) - 1, len(probe)], []
    for start, stop in pairwise(cuts):
        table = tuple(range(pages_for(stop, page_size)))
        batch = build_batch(cache, [WorkChunk(work, start, stop - start, True, table)])
        found.append(model.forward(batch, torch.arange(stop - start, device=model.device)))
    error = (torch.cat(found) - expected).abs().max().item()
    limit = TOLERANCE[model.dtype] * expected.abs().max().item()
    if not error <= limit:
        raise CheckpointError(
            f"{model.facts.name}: with paged attention its logits differ by {error:.3g} (rounding explains "
            f"{limit:.3g}), so it computes something outside the attention interface. Serve this model by "
            "another engine (upstream: vLLM)"
        )
