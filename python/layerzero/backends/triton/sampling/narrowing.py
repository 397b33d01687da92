# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""The passes over the vocabulary that sampling takes; `sampling.py` says how they work together.

A token's weight is `exp(logit - top)`, so that the largest is 1. What is looked for is written as two intervals of logits,
`(a_lo, a_hi]` for the token that ends the set of kept ones and `(b_lo, b_hi]` for the one that is drawn.
"""

import triton
import triton.language as tl

from ..numerals import is_nan
from ..overlapping import go_on, wait
from .drawing import code_of, last_weightless, room, row_ends, uniform_number, weight_of

# Sums of float32 are off by less than this.
_MARGIN = tl.constexpr(2e-5)
# What lies this far below the top weighs next to nothing: steps need not go there. It is three times a power of two, so that
# multiples of a step are exact, up to so many.
_DEPTH = tl.constexpr(24.0)
_MOST_STEPS = tl.constexpr(4194304.0)
# How often steps are halved at most where numbers lie close together.
_HALVED = tl.constexpr(10)
# How near to a guess the thresholds lie, as a share of the way to the next step, and how much wider their gaps become away
# from it (the nearer to one, the more). A guess is off by tens of tokens, and seldom by hundreds.
_NEAR = tl.constexpr(0.018)
_SPREAD = tl.constexpr(1.12)
# How finely a guess is looked for between two steps.
_GRAIN = tl.constexpr(512)


@triton.jit
def _parts(logits_ptr, stride, each, PARTS: tl.constexpr):
    """The row and the parts a program works on: where the row begins, the first part and the one after the last."""
    program = tl.program_id(0)
    programs = PARTS // each
    row = (program // programs).to(tl.int64)
    first = program % programs * each
    return row, logits_ptr + row * stride, first, first + each


@triton.jit
def _sums_above(
    values, row_ptr, start, end, top,
    BY_COUNT: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """How much of a part lies above each of some numbers, in float32. A thread keeps to its own tokens of a block."""
    sums = tl.zeros([COUNT, BLOCK], tl.float32)
    # Where all is minus infinity, differences to it would not be numbers.
    base = tl.where(top > float("-inf"), top, 0.0)
    for begin in range(start, end, BLOCK * AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            column = begin + number * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
            above = (x[None, :] > values[:, None]).to(tl.float32)
            sums += above if BY_COUNT else above * tl.exp(x - base)[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _step(top, least, STEPS: tl.constexpr):
    """How far steps are apart: so little that they just reach from the largest number to the smallest or the depth."""
    step = tl.full([], _DEPTH / STEPS, tl.float32)
    for _ in tl.static_range(_HALVED):
        step = tl.where(top - least <= step * (STEPS // 2 - 1), step * 0.5, step)
    return step


@triton.jit
def _stairs(highest, step, STEPS: tl.constexpr):
    """The steps from the highest down; above the last one is everything."""
    place = tl.arange(0, STEPS)
    return tl.where(place == STEPS - 1, float("-inf"), (highest - place.to(tl.float32)) * step)


@triton.jit(do_not_specialize=["each"])
def survey(
    logits_ptr, work_ptr, stride, vocab, share, each,
    BY_COUNT: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr, STEPS: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The extremes of each part, and how much lies above steps below its largest number."""
    go_on(OVERLAPS)
    row, row_ptr, first, beyond = _parts(logits_ptr, stride, each, PARTS)
    _, _, _, ends, steps, _, _, _ = room(work_ptr, row, WORDS, PARTS, KEPT, STEPS, COUNT)
    for part in range(first, beyond):
        start = part * share
        end = tl.minimum(start + share, vocab)
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        leasts = tl.full([BLOCK], float("inf"), tl.float32)
        for begin in range(start, end, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
            tops = tl.maximum(tops, x, propagate_nan=tl.PropagateNan.ALL)
            leasts = tl.where((x < leasts) & (x > float("-inf")), x, leasts)
        nans = is_nan(tops)
        top = tl.max(tl.where(nans, float("-inf"), tops), 0)
        least = tl.min(leasts, 0)
        step = _step(top, least, STEPS)
        highest = tl.floor(top / step)
        tl.store(ends + part, top)
        tl.store(ends + PARTS + part, least)
        tl.store(ends + 2 * PARTS + part, tl.max(nans.to(tl.float32), 0))
        tl.store(ends + 3 * PARTS + part, highest)
        tl.store(ends + 4 * PARTS + part, step)
        values = _stairs(highest, step, STEPS)
        sums = _sums_above(values, row_ptr, start, end, top, BY_COUNT, STEPS, CHUNK, AT_ONCE)
        tl.store(steps + part * STEPS + tl.arange(0, STEPS), sums)


@triton.jit
def _above_steps(ends, steps, top, BY_COUNT: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """The steps of a row, how much of the row lies above each, and the weight of all; the highest step as a multiple, and how
    far steps are apart. Every step of the row is one of a part, or above all of the part, or below."""
    part = tl.arange(0, PARTS)
    place = tl.arange(0, STEPS)
    tops = tl.load(ends + part)
    own = tl.load(ends + 3 * PARTS + part)
    own_step = tl.load(ends + 4 * PARTS + part)
    sums = tl.load(steps + part[:, None] * STEPS + place[None, :])
    step = tl.max(own_step, 0)
    highest = tl.floor(top / step)
    times = step / own_step
    at = own[:, None] - (highest - place.to(tl.float32))[None, :] * times[:, None]
    within = tl.where(at < STEPS - 1, tl.where(at > 0.0, at, 0.0), STEPS - 1.0).to(tl.int32)
    above = tl.where(at >= 0.0, tl.gather(sums, within, 1), 0.0)
    # Above the last step is everything, in parts as in the row.
    above = tl.where(place[None, :] == STEPS - 1, sums, above)
    if not BY_COUNT:
        above *= tl.where(tops > float("-inf"), tl.exp(tops - top), 0.0)[:, None]
    above = tl.sum(above, 0)
    total = tl.sum(tl.where(place == STEPS - 1, above, 0.0), 0)
    exact = tl.abs(highest) * tl.max(times, 0) < _MOST_STEPS
    values = tl.where(exact, _stairs(highest, step, STEPS), float("-inf"))
    return values, above, total, highest, step


@triton.jit
def _narrowed(lo, hi, values, sums, low, high):
    """The interval of the first number above which lies no more than `low`, nor more than `high`."""
    hi = tl.minimum(hi, tl.min(tl.where((sums <= low) & (values > float("-inf")), values, float("inf")), 0))
    lo = tl.maximum(lo, tl.max(tl.where(sums > high, values, float("-inf")), 0))
    return lo, hi


@triton.jit
def _intervals(
    a_lo, a_hi, b_lo, b_hi, values, sums, total, wanted, u, top, BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr
):
    """The intervals, narrowed by sums above numbers."""
    if BY_COUNT:
        # Counts are exact, and below 2^24.
        between = wanted.to(tl.float32) - 0.5
        a_lo, a_hi = _narrowed(a_lo, a_hi, values, sums, between, between)
    else:
        least_kept = total
        most_kept = total
        if not ALL_KEPT:
            least_kept = wanted.to(tl.float64, bitcast=True).to(tl.float32) * total
            low, high = least_kept * (1.0 - _MARGIN), least_kept * (1.0 + _MARGIN)
            a_lo, a_hi = _narrowed(a_lo, a_hi, values, sums, low, high)
            most_kept = tl.minimum(least_kept + tl.exp(a_hi - top), total)
        low, high = u * least_kept * (1.0 - _MARGIN), u * most_kept * (1.0 + _MARGIN)
        b_lo, b_hi = _narrowed(b_lo, b_hi, values, sums, low, high)
    return a_lo, a_hi, b_lo, b_hi


@triton.jit
def _guess(target, sums, highest, step, STEPS: tl.constexpr):
    """About where the sum above is the target, by the cubic through the four steps around it."""
    place = tl.arange(0, STEPS)
    at = tl.sum((sums <= target).to(tl.int32), 0) - 1
    before = tl.sum(tl.where(place == at - 1, sums, 0.0), 0)
    above = tl.sum(tl.where(place == at, sums, 0.0), 0)
    below = tl.sum(tl.where(place == at + 1, sums, 0.0), 0)
    after = tl.sum(tl.where(place == tl.minimum(at + 2, STEPS - 1), sums, 0.0), 0)
    s = (tl.arange(0, _GRAIN).to(tl.float32) + 0.5) / _GRAIN
    outer = (after * (s + 1.0) - before * (s - 2.0)) * s * (s - 1.0) / 6.0
    inner = (above * (s - 1.0) - below * s) * (s + 1.0) * (s - 2.0) / 2.0
    way = tl.sum((outer + inner < target).to(tl.float32), 0) / _GRAIN
    return (highest - at.to(tl.float32) - way) * step


@triton.jit
def _packed(lo, hi, guess, least, place, COUNT: tl.constexpr):
    """Numbers within an interval, on either side the nearer to each other the nearer to a guess they are; evenly where the
    interval is open."""
    place = place % COUNT
    is_open = lo == float("-inf")
    lo = tl.where(is_open, tl.minimum(least, hi), lo)
    guess = tl.minimum(tl.maximum(guess, lo), hi)
    way = (place % (COUNT // 2) + 1).to(tl.float32) * (2.0 / COUNT)
    far = _NEAR * way / (_SPREAD - way)
    packed = guess + tl.where(place < COUNT // 2, hi - guess, lo - guess) * far
    return tl.where(is_open, hi - (hi - lo) * ((place + 1).to(tl.float32) / (COUNT + 1)), packed)


@triton.jit(do_not_specialize=["wanted", "seed", "each", "step"])
def narrow(
    logits_ptr, uniform_ptr, work_ptr, wanted: tl.int64, seed: tl.int64, stride, vocab, share, each, step,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    KEPT: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """How much lies above thresholds within the intervals that the steps leave."""
    wait(OVERLAPS)
    go_on(OVERLAPS)
    row, row_ptr, first, beyond = _parts(logits_ptr, stride, each, PARTS)
    _, _, _, ends, steps, sums, thresholds, edges = room(work_ptr, row, WORDS, PARTS, KEPT, STEPS, COUNT)
    top, least, _ = row_ends(ends, PARTS)
    values, above, total, highest, apart = _above_steps(ends, steps, top, BY_COUNT, PARTS, STEPS)
    place = tl.arange(0, COUNT)
    u = uniform_number(uniform_ptr, row, step, seed, GIVEN).to(tl.float32)
    nowhere = tl.full([], float("-inf"), tl.float32)
    a_lo, a_hi, b_lo, b_hi = _intervals(
        nowhere, top, nowhere, top, values, above, total, wanted, u, top, BY_COUNT, ALL_KEPT
    )
    if BY_COUNT:
        guess = _guess(wanted.to(tl.float32) - 0.5, above, highest, apart, STEPS)
        values = _packed(a_lo, a_hi, guess, least, place, COUNT)
    elif ALL_KEPT:
        guess = _guess(u * total, above, highest, apart, STEPS)
        values = _packed(b_lo, b_hi, guess, least, place, COUNT)
    else:
        kept = wanted.to(tl.float64, bitcast=True).to(tl.float32) * total
        for_a = _packed(a_lo, a_hi, _guess(kept, above, highest, apart, STEPS), least, place, COUNT // 2)
        for_b = _packed(b_lo, b_hi, _guess(u * kept, above, highest, apart, STEPS), least, place, COUNT // 2)
        values = tl.where(place < COUNT // 2, for_a, for_b)
    if first == 0:
        tl.store(thresholds + place, values)
        tl.store(edges, a_lo)
        tl.store(edges + 1, a_hi)
        tl.store(edges + 2, b_lo)
        tl.store(edges + 3, b_hi)
        tl.store(edges + 4, total)
    for part in range(first, beyond):
        start = part * share
        end = tl.minimum(start + share, vocab)
        mine = _sums_above(values, row_ptr, start, end, top, BY_COUNT, COUNT, CHUNK, AT_ONCE)
        tl.store(sums + part * COUNT + place, mine)


@triton.jit
def _between(x, a_lo, a_hi, b_lo, b_hi):
    return ((x > a_lo) & (x <= a_hi)) | ((x > b_lo) & (x <= b_hi))


@triton.jit(do_not_specialize=["wanted", "seed", "each", "step"])
def put_aside(
    logits_ptr, uniform_ptr, work_ptr, wanted: tl.int64, seed: tl.int64, stride, vocab, share, each, step,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    KEPT: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The weight of what lies above the intervals, in float64, and the tokens within them."""
    wait(OVERLAPS)
    go_on(OVERLAPS)
    row, row_ptr, first, beyond = _parts(logits_ptr, stride, each, PARTS)
    codes, exact, counts, ends, _, sums, thresholds, edges = room(work_ptr, row, WORDS, PARTS, KEPT, STEPS, COUNT)
    top, _, _ = row_ends(ends, PARTS)
    place = tl.arange(0, COUNT)
    above = tl.sum(tl.load(sums + tl.arange(0, PARTS)[:, None] * COUNT + place[None, :]), 0)
    u = uniform_number(uniform_ptr, row, step, seed, GIVEN).to(tl.float32)
    a_lo, a_hi, b_lo, b_hi = _intervals(
        tl.load(edges), tl.load(edges + 1), tl.load(edges + 2), tl.load(edges + 3),
        tl.load(thresholds + place), above, tl.load(edges + 4), wanted, u, top, BY_COUNT, ALL_KEPT,
    )  # fmt: skip
    if BY_COUNT:
        # All that may be kept is few: nothing is left above.
        a_hi = tl.full([], float("inf"), tl.float32)
        b_lo = a_lo
        b_hi = a_hi
    if ALL_KEPT:
        a_lo = tl.full([], float("inf"), tl.float32)
        a_hi = a_lo
    if first == 0:
        tl.store(edges + 5, a_lo)
        tl.store(edges + 6, a_hi)
        tl.store(edges + 7, b_lo)
        tl.store(edges + 8, b_hi)
    # What weighs nothing cannot be drawn.
    lowest = last_weightless(top)
    a_lo = tl.maximum(a_lo, lowest)
    b_lo = tl.maximum(b_lo, lowest)
    for part in range(first, beyond):
        start = part * share
        end = tl.minimum(start + share, vocab)
        total = tl.zeros([BLOCK], tl.float64)
        above_a = tl.zeros([BLOCK], tl.float64)
        above_b = tl.zeros([BLOCK], tl.float64)
        numbers = tl.zeros([BLOCK], tl.int32)
        last = tl.zeros([BLOCK], tl.int32)
        for begin in range(start, end, BLOCK * AT_ONCE):
            for number in tl.static_range(AT_ONCE):
                column = begin + number * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
                weight = weight_of(x, top)
                total += weight
                above_a += tl.where(x > a_hi, weight, 0.0)
                above_b += tl.where(x > b_hi, weight, 0.0)
                among = _between(x, a_lo, a_hi, b_lo, b_hi)
                last = tl.where(among, column, last)
                numbers += among.to(tl.int32)
        slot = tl.cumsum(numbers, 0) - numbers
        tl.store(counts + part, tl.sum(numbers, 0))
        # Three sums for the price of one.
        weights = tl.sum(tl.join(tl.join(total, above_b), tl.join(above_a, tl.zeros_like(total))), 0)
        which = 2 * tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :]
        tl.store(exact + which * PARTS + part, weights, mask=which < 3)
        if tl.max(numbers, 0) <= 1:
            x = tl.load(row_ptr + last, mask=numbers > 0, other=0.0).to(tl.float32)
            tl.store(codes + slot * PARTS + part, code_of(x, last), mask=(numbers > 0) & (slot < KEPT))
        else:
            for begin in range(start, end, BLOCK * AT_ONCE):
                for number in tl.static_range(AT_ONCE):
                    column = begin + number * BLOCK + tl.arange(0, BLOCK)
                    x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
                    among = _between(x, a_lo, a_hi, b_lo, b_hi)
                    tl.store(codes + slot * PARTS + part, code_of(x, column), mask=among & (slot < KEPT))
                    slot += among.to(tl.int32)
