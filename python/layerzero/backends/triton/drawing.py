# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""The kernels sampling consists of; `sampling.py` says how they work together.

A token's weight is `exp(logit - top)`, so that the largest is 1. What is looked for is written as two intervals of logits,
`(a_lo, a_hi]` for the token that ends the set of kept ones and `(b_lo, b_hi]` for the one that is drawn.
"""

import triton
import triton.language as tl

from .numerals import is_nan

# Sums of float32 are off by less than this.
_MARGIN = tl.constexpr(2e-5)
# What lies this far below the top weighs next to nothing: thresholds need not go there.
_DEPTH = tl.constexpr(24.0)
_LOWEST_KEY = tl.constexpr(-2147483648)
_HIGHEST_KEY = tl.constexpr(2147483647)


@triton.jit
def uniform_number(uniform_ptr, row, step, seed, GIVEN: tl.constexpr):
    """The number of a row, as float64 within 0 to 1: the one given, or the SplitMix64 stream of the seed."""
    if GIVEN:
        u = tl.load(uniform_ptr + row * step).to(tl.float64)
    else:
        golden = 0x9E3779B97F4A7C15
        z = _mixed(_mixed(seed.to(tl.uint64) + golden) + (row + 1).to(tl.uint64) * golden)
        u = (z >> 11).to(tl.float64) * 1.1102230246251565e-16
    # A NaN is exceeded by nothing, as a number beyond all.
    u = tl.where(is_nan(u), 1.0, u)
    return tl.minimum(tl.maximum(u, 0.0), 1.0)


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _key(x):
    """An integer that orders as the number does; both zeros have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _number(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _row_ends(ends_ptr, row, SPLITS: tl.constexpr):
    """The largest number of a row, the smallest finite one, and whether there is a NaN."""
    at = ends_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * 3
    return tl.max(tl.load(at), 0), tl.min(tl.load(at + 1), 0), tl.max(tl.load(at + 2), 0)


@triton.jit
def _extremes(logits_ptr, ends_ptr, stride, vocab, share, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    start = (part % SPLITS * share).to(tl.int32)
    end = tl.minimum(start + share, vocab)
    logits_ptr += part // SPLITS * stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    nan = tl.zeros([BLOCK], tl.float32)
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
        nan = tl.where(is_nan(x), 1.0, nan)
        top = tl.where(x > top, x, top)
        least = tl.where((x < least) & (x > float("-inf")), x, least)
    tl.store(ends_ptr + part * 3, tl.max(top, 0))
    tl.store(ends_ptr + part * 3 + 1, tl.min(least, 0))
    tl.store(ends_ptr + part * 3 + 2, tl.max(nan, 0))


@triton.jit
def _thresholds(a_lo, a_hi, b_lo, b_hi, top, least, NUMBER: tl.constexpr, BY_COUNT: tl.constexpr, COUNT: tl.constexpr):
    """Where a round looks: over the whole row at first, then within the intervals, half of them within each."""
    place = tl.arange(0, COUNT)
    if NUMBER == 0:
        width = tl.minimum(top - least, _DEPTH)
        return tl.where(place == COUNT - 1, float("-inf"), top - width * ((place + 1).to(tl.float32) / COUNT))
    else:
        half: tl.constexpr = COUNT if BY_COUNT else COUNT // 2
        lo = tl.where(place < half, a_lo, b_lo)
        hi = tl.where(place < half, a_hi, b_hi)
        lo = tl.where(lo == float("-inf"), tl.minimum(least, hi), lo)
        return tl.maximum(hi - (hi - lo) * ((place % half + 1).to(tl.float32) / (half + 1)), lo)


@triton.jit
def _narrowed(lo, hi, values, sums, low, high, mine):
    """The interval of the first number above which lies no more than `low`, nor less than `high`."""
    hi = tl.minimum(hi, tl.min(tl.where(mine & (sums <= low) & (values > float("-inf")), values, float("inf")), 0))
    lo = tl.maximum(lo, tl.max(tl.where(mine & (sums >= high), values, float("-inf")), 0))
    return lo, hi


@triton.jit
def _intervals(
    uniform_ptr, sums_ptr, edges_ptr, wanted, seed, row, rows, step, top, least,
    NUMBER: tl.constexpr, BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """The intervals before round `NUMBER`, from the round before it."""
    a_lo = tl.full([], float("-inf"), tl.float32)
    b_lo = a_lo
    a_hi = top
    b_hi = top
    if NUMBER > 0:
        before = edges_ptr + ((NUMBER - 1) * rows + row) * 4
        a_lo = tl.load(before)
        a_hi = tl.load(before + 1)
        b_lo = tl.load(before + 2)
        b_hi = tl.load(before + 3)
        values = _thresholds(a_lo, a_hi, b_lo, b_hi, top, least, NUMBER - 1, BY_COUNT, COUNT)
        place = tl.arange(0, COUNT)
        part = row * SPLITS + tl.arange(0, SPLITS)
        at = ((NUMBER - 1) * rows * SPLITS + part)[:, None] * COUNT + place[None, :]
        sums = tl.sum(tl.load(sums_ptr + at), 0)
        if BY_COUNT:
            # Counts are exact, and below 2^24 or so far beyond what is wanted that it does not matter.
            wanted_count = wanted.to(tl.float32)
            a_lo, a_hi = _narrowed(a_lo, a_hi, values, sums, wanted_count - 1.0, wanted_count, place < COUNT)
        else:
            total = tl.sum(tl.load(sums_ptr + part * COUNT + COUNT - 1), 0)
            u = uniform_number(uniform_ptr, row, step, seed, GIVEN).to(tl.float32)
            for_a = (place < COUNT // 2) | (NUMBER == 1)
            for_b = (place >= COUNT // 2) | (NUMBER == 1)
            least_kept = total
            most_kept = total
            if not ALL_KEPT:
                least_kept = wanted.to(tl.float64, bitcast=True).to(tl.float32) * total
                low, high = least_kept * (1.0 - _MARGIN), least_kept * (1.0 + _MARGIN)
                a_lo, a_hi = _narrowed(a_lo, a_hi, values, sums, low, high, for_a)
                most_kept = tl.minimum(least_kept + tl.exp(a_hi - top), total)
            low, high = u * least_kept * (1.0 - _MARGIN), u * most_kept * (1.0 + _MARGIN)
            b_lo, b_hi = _narrowed(b_lo, b_hi, values, sums, low, high, for_b)
    return a_lo, a_hi, b_lo, b_hi


@triton.jit(do_not_specialize=["wanted", "seed", "step", "rows"])
def _round(
    logits_ptr, uniform_ptr, ends_ptr, sums_ptr, edges_ptr, wanted: tl.int64, seed: tl.int64,
    stride, vocab, share, step, rows,
    NUMBER: tl.constexpr, BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, SPLITS: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = part // SPLITS
    top, least, _ = _row_ends(ends_ptr, row, SPLITS)
    a_lo, a_hi, b_lo, b_hi = _intervals(
        uniform_ptr, sums_ptr, edges_ptr, wanted, seed, row, rows, step, top, least,
        NUMBER, BY_COUNT, ALL_KEPT, GIVEN, SPLITS, COUNT,
    )  # fmt: skip
    if part % SPLITS == 0:
        here = edges_ptr + (NUMBER * rows + row) * 4
        tl.store(here, a_lo)
        tl.store(here + 1, a_hi)
        tl.store(here + 2, b_lo)
        tl.store(here + 3, b_hi)
    values = _thresholds(a_lo, a_hi, b_lo, b_hi, top, least, NUMBER, BY_COUNT, COUNT)
    start = (part % SPLITS * share).to(tl.int32)
    end = tl.minimum(start + share, vocab)
    logits_ptr += row * stride
    sums = tl.zeros([COUNT, BLOCK], tl.float32)
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
        weight = tl.full([BLOCK], 1.0, tl.float32) if BY_COUNT else tl.exp(x - top)
        sums += tl.where(x[None, :] > values[:, None], weight[None, :], 0.0)
    at = sums_ptr + (NUMBER * rows * SPLITS + part) * COUNT + tl.arange(0, COUNT)
    tl.store(at, tl.sum(sums, 1))


@triton.jit(do_not_specialize=["wanted", "seed", "step", "rows"])
def _put_aside(
    logits_ptr, uniform_ptr, ends_ptr, sums_ptr, edges_ptr, exact_ptr, places_ptr, counts_ptr, wanted: tl.int64,
    seed: tl.int64, stride, vocab, share, step, rows,
    NUMBER: tl.constexpr, BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, SPLITS: tl.constexpr,
    COUNT: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = part // SPLITS
    top, least, _ = _row_ends(ends_ptr, row, SPLITS)
    a_lo, a_hi, b_lo, b_hi = _intervals(
        uniform_ptr, sums_ptr, edges_ptr, wanted, seed, row, rows, step, top, least,
        NUMBER, BY_COUNT, ALL_KEPT, GIVEN, SPLITS, COUNT,
    )  # fmt: skip
    if BY_COUNT:
        # All that may be kept is few: nothing is left above.
        a_hi = tl.full([], float("inf"), tl.float32)
        b_lo = a_lo
        b_hi = a_hi
    if ALL_KEPT:
        a_lo = tl.full([], float("inf"), tl.float32)
        a_hi = a_lo
    if part % SPLITS == 0:
        here = edges_ptr + (NUMBER * rows + row) * 4
        tl.store(here, a_lo)
        tl.store(here + 1, a_hi)
        tl.store(here + 2, b_lo)
        tl.store(here + 3, b_hi)
    start = (part % SPLITS * share).to(tl.int32)
    end = tl.minimum(start + share, vocab)
    logits_ptr += row * stride
    total = tl.zeros([BLOCK], tl.float64)
    above_a = tl.zeros([BLOCK], tl.float64)
    above_b = tl.zeros([BLOCK], tl.float64)
    found = tl.zeros([], tl.int32)
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
        weight = tl.exp(x.to(tl.float64) - top.to(tl.float64))
        total += weight
        above_a += tl.where(x > a_hi, weight, 0.0)
        above_b += tl.where(x > b_hi, weight, 0.0)
        between = ((x > a_lo) & (x <= a_hi)) | ((x > b_lo) & (x <= b_hi))
        place = found + tl.cumsum(between.to(tl.int32), 0) - 1
        tl.store(places_ptr + part * KEPT + place, column, mask=between & (place < KEPT))
        found += tl.sum(between.to(tl.int32), 0)
    tl.store(counts_ptr + part, found)
    tl.store(exact_ptr + part * 3, tl.sum(total, 0))
    tl.store(exact_ptr + part * 3 + 1, tl.sum(above_a, 0))
    tl.store(exact_ptr + part * 3 + 2, tl.sum(above_b, 0))
