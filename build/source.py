"""Opens the input of a build: the checked checkpoint, and the decisions made before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from nearfar.build.adapters import folder_of, pair_of, short_name
from nearfar.build.embedding import gives_embeddings, longest_text
from nearfar.build.options import GROUP_SIZE, QUANT, BuildOptions
from nearfar.build.tensors import check_model, right_head
from nearfar.build.unread import check_unread, foreign_code
from nearfar.build.weights.adapted import merged
from nearfar.build.weights.choice import choose_matrices
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.lora import open_lora
from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantize import Scheme
from nearfar.build.weights.quantized import find_quantized
from nearfar.build.weights.quantized.contract import Quantized, finer, held_in
from nearfar.build.weights.stream import WeightsReport
from nearfar.build.weights.ways import stored_as
from nearfar.edge_runtime.engine.sampling_params import defaults_of
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.ends import end_tokens
from nearfar.edge_runtime.text.tokenizer import tokenizer_of
from nearfar.errors import ArtifactError, BuildError, CheckpointError
from nearfar.format.answers import AnswerFormat
from nearfar.format.sampling import NOTHING, SamplingDefaults
from nearfar.kernels.quantized import Matrix, StorableMatrices
from nearfar.step.config import ConfigReader
from nearfar.step.kinds import CONFIG
from nearfar.step.model import Model
from nearfar.step.params import Param
from nearfar.step.reading import Reading, read_model, without_prefix

PAIRS_ALONE = StorableMatrices.pairs()


@dataclass(frozen=True)
class Source:
    """The checked checkpoint. `quantized`: its quantized matrices, if any; `keeps`: those whose codes are
    carried over. `answers`: how the model marks its answers, where it has a chat template. `sampling`: its
    sampling defaults. `rounding`: for each cache how 4-bit keys are rounded, where a calibration has found it
    (nearfar.format.kv.rounding). `notes`: lines for the user about how the checkpoint was read. `storable`:
    what matrices that this build quantizes may be stored in.
    """

    checkpoint: Checkpoint
    reading: Reading
    model: Model
    matrices: dict[str, Matrix]
    scheme: Scheme
    report: WeightsReport
    quantized: Quantized | None
    keeps: frozenset[str] = frozenset()
    answers: AnswerFormat | None = None
    sampling: SamplingDefaults = NOTHING
    rounding: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    storable: StorableMatrices = PAIRS_ALONE

    @property
    def params(self) -> tuple[Param, ...]:
        """The weights, in the order in which a step reads them."""
        return self.model.step.params

    def bytes_of(self, param: Param) -> int:
        """Bytes of a weight as targets store it."""
        return self.matrices[param.name].bytes if param.is_matrix else 4 * param.n

    def stored_as(self, schemes: Mapping[str, Scheme]) -> Source:
        """The source with some matrices in other schemes, by the names of their parameters."""
        changed = {name: stored_as(self.matrices[name], scheme) for name, scheme in schemes.items()}
        return replace(self, matrices=self.matrices | changed)

    def held_by(self, target: str, held: StorableMatrices) -> Source:
        """The source as a target that can store `held` stores it: codes in other groups are requantized in
        finer groups, scales that are stored in other ways become float16 pairs. Raises BuildError where the
        options ask for other groups.
        """
        if all(map(held.holds, self.matrices.values())):
            return self
        if not self.keeps:
            there = {matrix.group for matrix in self.matrices.values() if matrix.quantized}
            raise BuildError(
                f"target {target} has no kernels for groups of {min(there - set(held.groups))}: use "
                f"--group-size {', '.join(map(str, held.groups))}, or build for this target apart"
            )
        chosen = choose_matrices(self.params, self.checkpoint, self.scheme, self.quantized, self.keeps, held)
        report = replace(chosen.report, skipped=self.report.skipped, keys=self.report.keys)
        scheme = held_in(self.scheme, held) or finer(self.scheme, held.groups) or self.scheme
        return replace(self, matrices=chosen.matrices, scheme=scheme, report=report, keeps=chosen.keeps)


def open_source(options: BuildOptions) -> Source:
    """Open and check the checkpoint. Raises CheckpointError or BuildError before any weight is read, except
    for a head that may equal the embedding.
    """
    pair = pair_of(options.checkpoint, options.adapter)
    checkpoint = open_checkpoint(pair.checkpoint)
    embeds = gives_embeddings(checkpoint.path, options.embeddings)
    context = options.context or (longest_text(checkpoint.path) if embeds else None)
    reading = _read_model(checkpoint, context)
    check_unread(reading.config, reading.model_type)
    quantized, untouched = find_quantized(checkpoint), None
    if pair.adapter is not None:
        lora = open_lora(folder_of(pair.adapter), short_name(pair.adapter))
        adapted, quantized = merged(checkpoint, quantized, lora)
        checkpoint = adapted
        untouched = adapted.untouched(name for param in reading.model.step.params for name in param.tensors)
    head = right_head(reading, checkpoint, quantized, context, embeds)
    reading = head.reading
    model = _with_end_tokens(reading.model, checkpoint)
    codec = _text(checkpoint, model)
    if embeds:
        model, more = _embedding(model, checkpoint), ""
    else:
        model, more = _with_more_ends(model, codec)
    answers = codec.answers if codec.has_template else None
    sampling = defaults_of(checkpoint.generation_config)
    check_model(model, reading, checkpoint, quantized, head.copy)
    scheme, keeps = _scheme(options, quantized)
    params = model.step.params
    chosen = choose_matrices(params, checkpoint, scheme, quantized, keeps)
    report = chosen.report
    report.skipped = dict(Counter(_part(name) for name in reading.skipped))
    carried = quantized.notes if quantized is not None and keeps else ()
    return Source(
        checkpoint, reading, model, chosen.matrices, scheme, report, quantized, chosen.keeps, answers,
        sampling, notes=(*head.notes, *carried, *filter(None, (more, untouched, *_surprises(reading)))),
    )  # fmt: skip


def _read_model(checkpoint: Checkpoint, context: int | None) -> Reading:
    """Read the model. Errors name the file that states the config, which need not be a config.json."""
    try:
        return read_model(checkpoint.config, checkpoint.entries, context)
    except CheckpointError as error:
        if checkpoint.config_source == CONFIG:
            raise
        raise CheckpointError(f"{checkpoint.path}: {str(error).removeprefix(f'{CONFIG}: ')}") from error


def _surprises(reading: Reading) -> Iterator[str | None]:
    """Yield notes for the user, about settings of config.json that a build follows in an unexpected way."""
    yield foreign_code(reading.config, reading.model_type)
    for rope in reading.model.step.ropes.values():
        if rope.short is not None:
            original = rope.short.context
            yield (
                f"longrope: an engine with a context of more than {original:,} tokens takes the long factors "
                "for all its texts: logits of short ones then differ from transformers' "
                "(docs/decisions/0014-longrope.md). For the short factors load it with a context of "
                f"{original:,} tokens (--context {original}); onnx needs a build with --context {original}"
            )


def _part(tensor: str) -> str:
    """The part of a model that a tensor belongs to: the first part of its name."""
    return tensor.removeprefix("model.").partition(".")[0]


def _with_end_tokens(model: Model, checkpoint: Checkpoint) -> Model:
    """Give the model the end tokens of generation_config.json, if there are any: chat models end turns with
    more than one.
    """
    ids = ConfigReader(checkpoint.generation_config, "generation_config.json").token_ids(
        "eos_token_id", model.vocab_size
    )
    return model.ending_in(tuple(dict.fromkeys(ids or model.eos_token_ids)))


def _with_more_ends(model: Model, codec: TextCodec) -> tuple[Model, str]:
    """Give the model the end tokens that only the tokenizer and its chat template name, with a note for the
    user.
    """
    ends = end_tokens(codec, model.eos_token_ids, model.vocab_size)
    more = [str(codec.tokenizer.id_to_token(token)) for token in ends if token not in model.eos_token_ids]
    told = (
        f"answers end at {' and '.join(more)}, too: the tokenizer or its chat template says so, the configs "
        "do not"
    )
    return model.ending_in(ends), told if more else ""


def _embedding(model: Model, checkpoint: Checkpoint) -> Model:
    """Make the model an embedding model, without a head. Its checkpoint may hold the inner model alone, whose
    tensors have no prefix `model.`.
    """
    whole = any(name.startswith("model.") for name in checkpoint.entries)
    return (model if whole else without_prefix(model)).embedding_last()


def _text(checkpoint: Checkpoint, model: Model) -> TextCodec:
    """Open tokenizer and chat template as the runtimes do, before any work is done. Raises CheckpointError
    where they cannot be opened.
    """
    try:
        tokenizer = tokenizer_of(checkpoint.tokenizer_json)
    except Exception as error:  # the library raises plain exceptions
        raise CheckpointError(
            f"{checkpoint.path / 'tokenizer.json'}: no tokenizer ({error}): download it again"
        ) from error
    try:
        return TextCodec(
            tokenizer, checkpoint.tokenizer_config, checkpoint.chat_templates, model.bos_token_id
        )
    except ArtifactError as error:
        raise CheckpointError(
            f"{checkpoint.path}: {error}: correct it, or download the checkpoint again"
        ) from error


def _scheme(options: BuildOptions, quantized: Quantized | None) -> tuple[Scheme, frozenset[str]]:
    """The requested scheme, and the matrices that keep the checkpoint's codes: all that can, unless the
    options ask for others. Raises BuildError where the options exclude each other.
    """
    anew = options.requantize
    if anew is not None:
        if quantized is None:
            raise BuildError(
                f"{options.checkpoint} is not quantized and --requantize asks for {anew}: use --quant {anew}"
            )
        if options.quant is not None:
            raise BuildError(
                f"--quant {options.quant} and --requantize {anew} are both given: leave --quant out"
            )
        return Scheme.parse(anew, options.group_size or GROUP_SIZE), frozenset()
    scheme = quantized.scheme if quantized is not None else None
    if quantized is None or scheme is None:
        return Scheme.parse(options.quant or QUANT, options.group_size or GROUP_SIZE), frozenset()
    asked = Scheme.parse(options.quant or scheme.name, options.group_size or scheme.group_size)
    if replace(asked, scales=scheme.scales) != scheme:
        given = "--quant" if options.quant is not None else "--group-size"
        raise BuildError(
            f"{options.checkpoint} is quantized already ({quantized.name}: {scheme.name}, group "
            f"{scheme.group_size}) and {given} asks for {asked.name}, group {asked.group_size}: leave "
            "--quant and --group-size out to keep its weights as they are, quantize them again with "
            f"--requantize {asked.name}, or build from the checkpoint that it was made from"
        )
    return scheme, frozenset(name for name, found in quantized.tensors.items() if found is not None)
