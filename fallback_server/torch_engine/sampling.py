"""Chooses the next token of every row of a step, as docs/artifact.md defines it (greedy, sample, logprobs).

Rows with the same settings are computed together, and a row costs only what its settings need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nearfar.edge_runtime.engine.requests import Logprob
from nearfar.fallback_server.backend import Sampling
from nearfar.fallback_server.torch_engine.noise import SPAN, gumbel, split_seed

SORTED = 1024
"""How many of the largest logits are sorted first: nearly always they have the probability mass of top_p."""


PROMPT_LOGITS = 64 << 20
"""Most bytes of float32 logits for log-probabilities of prompts in one step."""
COPIES = 6
"""Most copies of a step's logits in memory at once: as the model gives them, in float32, as
log-probabilities, shaped, sorted, with noise.
"""


def prompt_rows(vocab: int) -> int:
    """Most prompt rows whose log-probabilities one step may compute."""
    return max(1, PROMPT_LOGITS // (4 * vocab))


def step_bytes(vocab: int, max_running: int) -> int:
    """Most bytes that the logits of one step take."""
    return (prompt_rows(vocab) + max_running) * vocab * 4 * COPIES


@dataclass(eq=False)
class RowState:
    """The sampling state of one request. `seed` is drawn.

    `counts` int32 [vocab] is kept while there are penalties: how often each token was generated, plus 1 << 24
    for a token of the prompt.
    """

    sampling: Sampling
    seed: int
    logprobs: int | None = None
    counts: torch.Tensor | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on the earlier tokens."""
        s = self.sampling
        return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


@dataclass(frozen=True)
class SampledToken:
    """The chosen token of a row. None: no token may be chosen (`broken`: because the logits are not
    finite).
    """

    token: int | None
    broken: bool = False
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class RowInput:
    """One row to sample: its state, the position that the token will have, and the grammar's bitmask int32
    [words].
    """

    state: RowState
    counter: int
    allowed: torch.Tensor | None = None


def prepare(
    sampling: Sampling, seed: int, prompt: Sequence[int], vocab: int, device: torch.device, **rest: object
) -> RowState:
    """Return the state of a new request, with its tensors on the device of the logits."""
    state = RowState(sampling, seed, **rest)  # type: ignore[arg-type]
    if state.penalized:
        state.counts = torch.zeros(vocab, dtype=torch.int32, device=device)
        state.counts[torch.tensor(prompt, dtype=torch.int64, device=device)] = 1 << 24
    bias = {token: value for token, value in sampling.logit_bias.items() if value}
    if bias:
        tokens = torch.tensor(list(bias), dtype=torch.int64, device=device)
        state.bias = tokens, torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
    return state


def sample(logits: torch.Tensor, rows: Sequence[RowInput]) -> list[SampledToken]:
    """Choose a token for each row of logits float32 [R, vocab] (which may be overwritten)."""
    states = [row.state for row in rows]
    raw = _raw_logprobs(logits, states)
    largest = logits.amax(1)
    finite = torch.isfinite(largest)
    if not bool(finite.all()):
        logits = torch.where(finite[:, None], logits, torch.zeros_like(logits))
    _shape(logits, rows)
    drawn = [index for index, state in enumerate(states) if state.sampling.temperature > 0]
    best = logits.max(1)
    tokens, possible = best.indices, finite & (best.values > -math.inf)
    if drawn:
        which = torch.tensor(drawn, device=logits.device)
        part = logits if len(drawn) == len(rows) else logits[which]
        tokens[which] = _draw(part, [rows[i] for i in drawn])
    packed = torch.stack([tokens, possible.long(), finite.long()]).tolist()
    choices = []
    for index, (token, ok, sound) in enumerate(zip(*packed, strict=True)):
        if not ok:
            choices.append(SampledToken(None, broken=not sound))
            continue
        _count(states[index], token)
        own, top = _of_token(raw.get(index), token, states[index].logprobs or 0)
        choices.append(SampledToken(token, logprob=own, top=top))
    return choices


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], top: int
) -> list[tuple[Logprob, tuple[Logprob, ...]]]:
    """Return the log-probability of tokens[r] under logits[r] float32 [R, vocab], and of the `top` likeliest
    tokens.
    """
    logprobs = torch.log_softmax(logits, 1)
    ids = torch.tensor(list(tokens), dtype=torch.int64, device=logits.device)
    own = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logits.shape[1]), dim=1) if top else None
    values = best.values.tolist() if best else [[]] * len(own)
    indices = best.indices.tolist() if best else [[]] * len(own)
    return [
        (Logprob(token, value), tuple(Logprob(i, v) for i, v in zip(*row, strict=True)))
        for token, value, row in zip(tokens, own, zip(indices, values, strict=True), strict=True)
    ]


def _count(state: RowState, token: int) -> None:
    if state.counts is not None:
        state.counts[token] += 1


def _raw_logprobs(logits: torch.Tensor, states: Sequence[RowState]) -> dict[int, torch.Tensor]:
    """Log-softmax of the raw logits, for the rows that request log-probabilities."""
    asked = [index for index, state in enumerate(states) if state.logprobs is not None]
    if not asked:
        return {}
    return dict(
        zip(asked, torch.log_softmax(logits[torch.tensor(asked, device=logits.device)], 1), strict=True)
    )


def _of_token(
    logprobs: torch.Tensor | None, token: int, top: int
) -> tuple[float | None, tuple[Logprob, ...]]:
    if logprobs is None:
        return None, ()
    own = float(logprobs[token])
    if not top:
        return own, ()
    best = logprobs.topk(min(top, len(logprobs)))
    return own, tuple(Logprob(t, v) for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _shape(logits: torch.Tensor, rows: Sequence[RowInput]) -> None:
    """Apply bias, allowed tokens and penalties, in place and in the order of docs/artifact.md."""
    for index, row in enumerate(rows):
        if row.state.bias is not None:
            logits[index].index_add_(0, *row.state.bias)
    masked = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
    if masked:
        which = torch.tensor([index for index, _ in masked], device=logits.device)
        words = torch.stack([mask for _, mask in masked]).to(logits.device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
        forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
        logits[which] = logits[which].masked_fill_(forbidden, -math.inf)
    counted = [(index, row.state) for index, row in enumerate(rows) if row.state.counts is not None]
    if counted:
        _penalize(logits, counted)


def _penalize(logits: torch.Tensor, counted: Sequence[tuple[int, RowState]]) -> None:
    index = torch.tensor([i for i, _ in counted], device=logits.device)
    counts = torch.stack([state.counts for _, state in counted if state.counts is not None])
    values = logits[index]
    repetition, presence, frequency = (
        _column([getattr(state.sampling, name) for _, state in counted], logits)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    generated = (counts & 0xFFFFFF).float()
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(counts != 0, repeated, values)
    # Where a grammar forbids a token its logit is -inf and stays -inf.
    logits[index] = values - frequency * generated - presence * (generated > 0)


def _draw(logits: torch.Tensor, rows: Sequence[RowInput]) -> torch.Tensor:
    """Draw a token per row: temperature, top_k, top_p, min_p, then the largest logit plus Gumbel noise, which
    is a draw by softmax.
    """
    samplings = [row.state.sampling for row in rows]
    # Subtracting the largest logit changes no choice, and a temperature near 0 cannot make the best logit
    # infinite.
    logits = logits - logits.amax(1, keepdim=True)
    logits = logits / _column([s.temperature for s in samplings], logits).clamp(min=1e-6)
    floor = _floor(logits, samplings)
    keep = logits >= floor.clamp(min=-SPAN)
    row, token = keep.nonzero(as_tuple=True)
    seeds = [split_seed(r.state.seed) for r in rows]
    low, high, counter = (
        torch.tensor(values, dtype=torch.int64, device=logits.device)[row]
        for values in ([s[0] for s in seeds], [s[1] for s in seeds], [r.counter for r in rows])
    )
    scores = torch.full_like(logits, -math.inf)
    scores[row, token] = logits[row, token] + gumbel(low, high, counter, token)
    return scores.argmax(1)


def _floor(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The smallest logit [R, 1] that top_k, top_p and min_p keep, each where it is set.

    The largest logit of each row is 0.
    """
    vocab = logits.shape[1]
    floor = torch.full((len(samplings), 1), -math.inf, device=logits.device)
    limited = [index for index, s in enumerate(samplings) if 0 < s.top_k < vocab]
    if limited:
        index = torch.tensor(limited, device=logits.device)
        ks = torch.tensor([samplings[i].top_k for i in limited], device=logits.device)
        best = logits[index].topk(int(ks.max()), dim=1).values
        floor[index] = best.gather(1, (ks - 1)[:, None])
    nuclear = [index for index, s in enumerate(samplings) if s.top_p < 1.0]
    if nuclear:
        index = torch.tensor(nuclear, device=logits.device)
        kept = logits[index].masked_fill(logits[index] < floor[index], -math.inf)
        floor[index] = torch.maximum(
            floor[index], _nucleus(kept, _column([samplings[i].top_p for i in nuclear], logits))
        )
    for row, s in enumerate(samplings):
        if s.min_p > 0:
            floor[row] = floor[row].clamp(min=math.log(s.min_p))
    return floor


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The largest t [R, 1] for which the tokens with logit ≥ t have at least the fraction top_p of the
    probability mass.
    """
    mass = torch.logsumexp(logits, 1, keepdim=True)
    for size in (min(SORTED, logits.shape[1]), logits.shape[1]):
        best = logits.topk(size, dim=1).values
        enough = torch.exp(best - mass).cumsum(1) >= top_p
        if size == logits.shape[1] or bool(enough[:, -1].all()):
            break
    # Rounding may leave the sum of all probabilities just below top_p; then all tokens are kept.
    first = torch.where(enough[:, -1:], enough.int().argmax(1, keepdim=True), size - 1)
    return best.gather(1, first)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
