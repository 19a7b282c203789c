"""Sampling as docs/artifact.md defines it: logits are adjusted by the whole device, then each row has one
workgroup.

Thresholds of top_k and top_p are found in integers with the order of the floats, four bits in a pass: 15
candidates are counted at once, so a row is read 8 times for a threshold instead of 32. Sums run in a fixed
order, so a seed gives one text.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sampler import BOUND, COLDEST, COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Sample
from nearfar.targets.gpu.kernels.common import HIGHEST, LOWEST, ceil_div, exactly, f32, finish
from nearfar.targets.gpu.kernels.script.text import prim_func

THREADS = 256
WAYS = 15
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)  # columns of sample_f32
SLOT, TOP_K, SEED_LOW, SEED_HIGH, COUNTER, FEED = range(6)  # columns of sample_i32
GENERATED = (1 << 24) - 1  # the bits of `counts` that count generated tokens


def sample(job: Sample) -> Staged:
    """The launches of a Sample job; between the two are the adjusted logits of each row."""
    rows, vocab, slots = job.rows, job.vocab, job.slots
    adjusted = ["logits", "sample_f32", "sample_i32", "logit_bias", "counts", "allowed", "scratch:0"]
    choose = ["scratch:0", "sample_f32", "sample_i32", "counts", "sampled", "tokens"]
    stages = (
        Stage(_adjust(rows, vocab, slots), tuple(adjusted)),
        Stage(_choose(rows, vocab, slots), tuple(choose)),
    )
    return Staged(stages, (((rows, vocab), "float32"),))


def ordered(value):
    """The uint32 of a float32's bits, changed so that the integers compare like the floats."""
    bits = T.reinterpret("uint32", value)
    return T.Select(bits >= T.uint32(1 << 31), bits ^ T.uint32(0xFFFFFFFF), bits | T.uint32(1 << 31))


def _adjust(rows: int, vocab: int, slots: int) -> tirx.PrimFunc:
    """The kernel for steps 1 to 5: bias, mask, penalties, temperature. Masked tokens get the lowest float."""
    masks = ceil_div(vocab, 32)

    @prim_func
    def kernel(
        logits: T.Buffer((MAX_ROWS, vocab), "float32"),
        sample_f32: T.Buffer((MAX_ROWS, COLUMNS), "float32"),
        sample_i32: T.Buffer((MAX_ROWS, COLUMNS), "int32"),
        logit_bias: T.Buffer((slots, vocab), "float32"),
        counts: T.Buffer((slots, vocab), "int32"),
        allowed: T.Buffer((slots, masks), "uint32"),
        adjusted: T.Buffer((rows, vocab), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(vocab, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(rows, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    value = T.alloc_local((2,), "float32")
                    at = T.alloc_local((3,), "int32")
                    at[0] = sample_i32[by, SLOT]
                    at[1] = bx * THREADS + tx
                    if at[0] >= 0 and at[1] < vocab:
                        value[0] = logits[by, at[1]] + logit_bias[at[0], at[1]]
                        at[2] = counts[at[0], at[1]]
                        if at[2] != 0:
                            if value[0] > T.float32(0):
                                value[0] = value[0] / sample_f32[by, REPETITION]
                            else:
                                value[0] = value[0] * sample_f32[by, REPETITION]
                        at[2] = T.bitwise_and(at[2], GENERATED)
                        if at[2] > 0:
                            value[0] = (
                                value[0] - sample_f32[by, FREQUENCY] * f32(at[2]) - sample_f32[by, PRESENCE]
                            )
                        if value[0] > T.float32(HIGHEST):
                            value[0] = T.float32(LOWEST)
                        if (allowed[at[0], at[1] // 32] >> T.Cast("uint32", at[1] % 32)) & T.uint32(
                            1
                        ) == T.uint32(0):
                            value[0] = T.float32(LOWEST)
                        # A NaN fails the comparison, and an infinity becomes the lowest float. A token with
                        # such a logit is never sampled.
                        value[1] = T.float32(LOWEST)
                        if value[0] > value[1]:
                            value[1] = value[0]
                            if sample_f32[by, TEMPERATURE] > T.float32(0):
                                value[1] = value[0] / T.max(sample_f32[by, TEMPERATURE], T.float32(COLDEST))
                                value[1] = T.max(T.min(value[1], T.float32(BOUND)), T.float32(-BOUND))
                        adjusted[by, at[1]] = value[1]

    return finish(kernel, "sample_adjust")


def _choose(rows: int, vocab: int, slots: int) -> tirx.PrimFunc:
    """The kernel for steps 6 to 9 and the writes, with one workgroup for each row."""
    turns = ceil_div(vocab, THREADS)

    @prim_func
    def kernel(
        adjusted: T.Buffer((rows, vocab), "float32"),
        sample_f32: T.Buffer((MAX_ROWS, COLUMNS), "float32"),
        sample_i32: T.Buffer((MAX_ROWS, COLUMNS), "int32"),
        counts: T.Buffer((slots, vocab), "int32"),
        sampled: T.Buffer((MAX_ROWS,), "int32"),
        tokens: T.Buffer((MAX_STEP,), "int32"),
    ):
        for bx in T.thread_binding(rows, thread="blockIdx.x"):
            for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                sums = T.alloc_shared((WAYS * THREADS,), "float32")
                found = T.alloc_shared((16,), "float32")
                value = T.alloc_local((4,), "float32")
                mass = T.alloc_local((WAYS,), "float32")
                key = T.alloc_local((3,), "uint32")
                s = T.alloc_local((4,), "uint32")
                at = T.alloc_local((3,), "int32")
                # The largest adjusted logit.
                value[0] = T.float32(LOWEST)
                for t in T.serial(turns):
                    if t * THREADS + tx < vocab:
                        value[0] = T.max(value[0], adjusted[bx, t * THREADS + tx])
                sums[tx] = value[0]
                T.tvm_storage_sync("shared")
                if tx == 0:
                    for t in T.serial(THREADS):
                        value[0] = T.max(value[0], sums[t])
                    found[15] = value[0]
                T.tvm_storage_sync("shared")
                value[3] = found[15]
                key[2] = T.uint32(0)  # tokens with ordered(l) >= key[2] are kept
                if sample_f32[bx, TEMPERATURE] > T.float32(0):
                    # Pass 0: top_k, counting tokens. Pass 1: top_p, adding exp(l - max) of those kept.
                    for job in T.serial(2):
                        if (job == 0 and sample_i32[bx, TOP_K] > 0) or (
                            job == 1 and sample_f32[bx, TOP_P] < T.float32(1)
                        ):
                            key[0] = T.uint32(0)  # the threshold, found from its highest bits
                            value[2] = f32(sample_i32[bx, TOP_K])
                            for step in T.serial(9):
                                # Step 0 of top_p only measures the sum over all kept tokens: every candidate
                                # is the same threshold.
                                if step > 0 or job == 1:
                                    for c in T.unroll(WAYS):
                                        mass[c] = T.float32(0)
                                    for t in T.serial(turns):
                                        if t * THREADS + tx < vocab:
                                            value[0] = adjusted[bx, t * THREADS + tx]
                                            key[1] = ordered(value[0])
                                            if key[1] >= key[2]:
                                                value[1] = T.float32(1)
                                                if job == 1:
                                                    value[1] = T.exp(value[0] - value[3])
                                                if step == 0:
                                                    mass[0] = mass[0] + value[1]
                                                else:
                                                    for c in T.unroll(WAYS):
                                                        if key[1] >= key[0] + (
                                                            T.Cast("uint32", c + 1)
                                                            << T.Cast("uint32", 32 - 4 * step)
                                                        ):
                                                            mass[c] = mass[c] + value[1]
                                    for c in T.unroll(WAYS):
                                        sums[c * THREADS + tx] = mass[c]
                                    T.tvm_storage_sync("shared")
                                    if tx < WAYS:
                                        value[0] = T.float32(0)
                                        for t in T.serial(THREADS):
                                            value[0] = value[0] + sums[tx * THREADS + t]
                                        found[tx] = value[0]
                                    T.tvm_storage_sync("shared")
                                    if step == 0:
                                        value[2] = found[0] * sample_f32[bx, TOP_P]
                                    else:
                                        s[0] = T.uint32(0)
                                        for c in T.unroll(WAYS):
                                            value[0] = found[c]
                                            if value[0] >= value[2]:
                                                s[0] = T.Cast("uint32", c + 1)
                                        key[0] = key[0] + (s[0] << T.Cast("uint32", 32 - 4 * step))
                            key[2] = T.max(key[2], key[0])
                    if sample_f32[bx, MIN_P] > T.float32(0):
                        key[2] = T.max(key[2], ordered(value[3] + T.log(sample_f32[bx, MIN_P])))
                    # The token with the largest logit is always kept, because a tiny top_p finds no
                    # threshold.
                    key[2] = T.min(key[2], ordered(value[3]))
                # The argmax of l + gumbel over the kept tokens, or of l at temperature 0.
                value[2] = T.float32(LOWEST)
                at[0] = tx
                for t in T.serial(turns):
                    at[1] = t * THREADS + tx
                    if at[1] < vocab:
                        value[0] = adjusted[bx, at[1]]
                        if ordered(value[0]) >= key[2] and value[0] > T.float32(LOWEST):
                            if sample_f32[bx, TEMPERATURE] > T.float32(0):
                                s[0] = T.reinterpret("uint32", sample_i32[bx, SEED_LOW]) * T.uint32(
                                    1664525
                                ) + T.uint32(1013904223)
                                s[1] = T.reinterpret("uint32", sample_i32[bx, SEED_HIGH]) * T.uint32(
                                    1664525
                                ) + T.uint32(1013904223)
                                s[2] = T.reinterpret("uint32", sample_i32[bx, COUNTER]) * T.uint32(
                                    1664525
                                ) + T.uint32(1013904223)
                                s[3] = T.Cast("uint32", at[1]) * T.uint32(1664525) + T.uint32(1013904223)
                                for turn in T.unroll(2):
                                    s[0] = s[0] + s[1] * s[3]
                                    s[1] = s[1] + s[2] * s[0]
                                    s[2] = s[2] + s[0] * s[1]
                                    s[3] = s[3] + s[1] * s[2]
                                    if turn == 0:
                                        for i in T.unroll(4):
                                            s[i] = s[i] ^ (s[i] >> T.uint32(16))
                                value[1] = (
                                    f32(T.Cast("int32", s[0] >> T.uint32(8))) + T.float32(0.5)
                                ) * exactly(2.0**-24)
                                # A u that rounds to 1, or a device's coarse log, would make the noise
                                # infinite.
                                value[0] = value[0] - T.log(T.max(-T.log(value[1]), T.float32(2.0**-24)))
                            if value[0] > value[2]:
                                value[2] = value[0]
                                at[0] = at[1]
                sums[tx] = value[2]
                sums[THREADS + tx] = f32(at[0])  # exact below 2^24; workgroup memory is full
                T.tvm_storage_sync("shared")
                if tx == 0:
                    at[1] = sample_i32[bx, SLOT]
                    if at[1] >= 0:
                        for t in T.serial(THREADS):
                            value[1] = sums[t]  # TVM takes no workgroup memory in a condition
                            at[2] = T.Cast("int32", sums[THREADS + t])
                            if value[1] > value[2] or (value[1] == value[2] and at[2] < at[0]):
                                value[2] = value[1]
                                at[0] = at[2]
                        if value[2] <= T.float32(LOWEST):
                            at[0] = -1  # no logit is finite and allowed
                        sampled[bx] = at[0]
                        if at[0] >= 0:
                            counts[at[1], at[0]] = counts[at[1], at[0]] + 1
                        at[2] = sample_i32[bx, FEED]
                        if at[2] >= 0:
                            tokens[T.min(at[2], 255)] = T.max(at[0], 0)

    return finish(kernel, "sample_choose")
