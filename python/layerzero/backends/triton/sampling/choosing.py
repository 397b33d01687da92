# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""The last step of sampling: the token of each row, among those put aside or in the whole row.

`near` says which. Codes order tokens as they are drawn, so that a token is found by the sum of weights up to its code.
"""

import triton
import triton.language as tl

from ..overlapping import wait
from .drawing import NO_TOKEN, code_of, id_of, last_above, logit_of, room, row_ends, uniform_number, weight_of


@triton.jit
def _tokens(begin, near, codes, counts, row_ptr, vocab, top, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes and weights of a block of tokens."""
    place = begin + tl.arange(0, BLOCK)
    if near:
        there = place // PARTS < tl.load(counts + place % PARTS)
        code = tl.load(codes + place, mask=there, other=NO_TOKEN)
        weight = tl.where(there, weight_of(logit_of(code), top), 0.0)
    else:
        x = tl.load(row_ptr + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
        weight = weight_of(x, top)
        code = tl.where(weight > 0.0, code_of(x, place), NO_TOKEN)
    return code, weight


@triton.jit
def _outermost(lo, hi, near, codes, counts, row_ptr, vocab, extent, top, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The interval of codes `(lo, hi]`, cut down to the tokens there are in it. Without any, `hi` is -1."""
    first = tl.full([BLOCK], NO_TOKEN, tl.int64)
    last = tl.full([BLOCK], -1, tl.int64)
    for begin in range(0, extent, BLOCK):
        code, _ = _tokens(begin, near, codes, counts, row_ptr, vocab, top, PARTS, BLOCK)
        among = (code > lo) & (code <= hi)
        first = tl.minimum(first, tl.where(among, code, NO_TOKEN))
        last = tl.maximum(last, tl.where(among, code, -1))
    return tl.min(first, 0) - 1, tl.max(last, 0)


@triton.jit
def _first(
    lo, hi, base, target, near, codes, counts, row_ptr, vocab, extent, top,
    BY_COUNT: tl.constexpr, BEYOND: tl.constexpr, PARTS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first code in `(lo, hi]` with which the sum, `base` before it, reaches (or exceeds) the target, or else the last;
    and the sum before it."""
    way = tl.arange(0, WAYS).to(tl.int64) + 1
    lo, hi = _outermost(lo, hi, near, codes, counts, row_ptr, vocab, extent, top, PARTS, BLOCK)
    while hi - lo > 1:
        bounds = lo + (hi - lo) * way // (WAYS + 1)
        sums = tl.zeros([WAYS, BLOCK], tl.float64)
        for begin in range(0, extent, BLOCK):
            code, weight = _tokens(begin, near, codes, counts, row_ptr, vocab, top, PARTS, BLOCK)
            if BY_COUNT:
                weight = tl.full([BLOCK], 1.0, tl.float64)
            among = (code > lo)[None, :] & (code[None, :] <= bounds[:, None])
            sums += tl.where(among, weight[None, :], 0.0)
        reached = base + tl.sum(sums, 1)
        if BEYOND:
            enough = reached > target
        else:
            enough = reached >= target
        hi = tl.min(tl.where(enough, bounds, hi), 0)
        lo = tl.max(tl.where(enough, lo, bounds), 0)
        base = tl.max(tl.where(enough, base, reached), 0)
        lo, hi = _outermost(lo, hi, near, codes, counts, row_ptr, vocab, extent, top, PARTS, BLOCK)
    return hi, base


@triton.jit
def _weight_up_to(hi, near, codes, counts, row_ptr, vocab, extent, top, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, extent, BLOCK):
        code, weight = _tokens(begin, near, codes, counts, row_ptr, vocab, top, PARTS, BLOCK)
        sums += tl.where(code <= hi, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _drawn(
    near, codes, counts, row_ptr, vocab, extent, top, total, above_a, above_b, a_lo, a_hi, b_lo, b_hi, u, wanted,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, PARTS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token a number draws, or -2 where those put aside do not hold it."""
    held = tl.full([], True, tl.int1)
    end = tl.full([], NO_TOKEN - 1, tl.int64)
    kept = total
    if not ALL_KEPT:
        target = wanted.to(tl.float64) if BY_COUNT else wanted.to(tl.float64, bitcast=True) * total
        end, before = _first(
            last_above(a_hi), last_above(a_lo), above_a, target,
            near, codes, counts, row_ptr, vocab, extent, top, BY_COUNT, False, PARTS, WAYS, BLOCK,
        )  # fmt: skip
        if BY_COUNT:
            reached = before + 1.0
            kept = _weight_up_to(end, near, codes, counts, row_ptr, vocab, extent, top, PARTS, BLOCK)
        else:
            reached = before + weight_of(logit_of(end), top)
            kept = reached
        held = (end >= 0) & (above_a < target) & ((reached >= target) | (a_lo == float("-inf")))
    # One is exceeded by nothing, however sums are rounded.
    drawn = tl.where(u < 1.0, u * kept, float("inf"))
    token, before = _first(
        last_above(b_hi), tl.minimum(last_above(b_lo), end), above_b, drawn,
        near, codes, counts, row_ptr, vocab, extent, top, False, True, PARTS, WAYS, BLOCK,
    )  # fmt: skip
    exceeds = before + weight_of(logit_of(token), top) > drawn
    is_last = (b_lo == float("-inf")) if ALL_KEPT else (token == end)
    held = held & (token >= 0) & (above_b <= drawn) & (exceeds | is_last)
    return tl.where(held | (near == 0), id_of(token), -2)


@triton.jit
def _sorted(code, count, SLOTS: tl.constexpr):
    """Codes in order, where those from `count` on are the same and beyond the others: a bitonic sort."""
    place = tl.arange(0, SLOTS)
    run = 1
    while run < count:
        away = run
        run *= 2
        while away > 0:
            other = tl.gather(code, place ^ away, 0)
            rising = (place & run) == 0
            before = (place & away) == 0
            code = tl.where(rising == before, tl.minimum(code, other), tl.maximum(code, other))
            away //= 2
    return code


@triton.jit
def _reaching(code, among, sums, enough, SLOTS: tl.constexpr):
    """The first of some codes that is enough, or else the last; the sum up to it, and whether it is enough."""
    place = tl.arange(0, SLOTS)
    first = tl.min(tl.where(among & enough, place, SLOTS), 0)
    last = tl.max(tl.where(among, place, -1), 0)
    here = place == tl.where(first < SLOTS, first, last)
    return tl.max(tl.where(here, code, -1), 0), tl.max(tl.where(here, sums, 0.0), 0), first < SLOTS


@triton.jit
def _among_few(
    codes, counts, count, top, total, above_a, above_b, a_lo, a_hi, b_lo, b_hi, u, wanted,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """As `_drawn`, where the tokens put aside are no more than `SLOTS`: sorted, they need no search."""
    number = tl.load(counts + tl.arange(0, PARTS))
    beyond = tl.cumsum(number, 0)
    place = tl.arange(0, SLOTS)
    # The part of each place: as many parts as end before it.
    part = tl.zeros([SLOTS], tl.int32)
    stride = PARTS // 2
    while stride > 0:
        part += tl.where(tl.gather(beyond, part + stride - 1, 0) <= place, stride, 0)
        stride //= 2
    slot = place - tl.gather(beyond - number, part, 0)
    code = tl.load(codes + slot * PARTS + part, mask=place < count, other=NO_TOKEN)
    code = _sorted(code, count, SLOTS)
    weight = tl.where(place < count, weight_of(logit_of(code), top), 0.0)
    held = tl.full([], True, tl.int1)
    end = tl.full([], NO_TOKEN - 1, tl.int64)
    kept = total
    if not ALL_KEPT:
        target = wanted.to(tl.float64) if BY_COUNT else wanted.to(tl.float64, bitcast=True) * total
        among = (code > last_above(a_hi)) & (code <= last_above(a_lo))
        share = tl.full([SLOTS], 1.0, tl.float64) if BY_COUNT else weight
        sums = above_a + tl.cumsum(tl.where(among, share, 0.0), 0)
        end, kept, reached = _reaching(code, among, sums, sums >= target, SLOTS)
        if BY_COUNT:
            kept = tl.sum(tl.where(code <= end, weight, 0.0), 0)
        held = (end >= 0) & (above_a < target) & (reached | (a_lo == float("-inf")))
    # One is exceeded by nothing, however sums are rounded.
    drawn = tl.where(u < 1.0, u * kept, float("inf"))
    among = (code > last_above(b_hi)) & (code <= tl.minimum(last_above(b_lo), end))
    sums = above_b + tl.cumsum(tl.where(among, weight, 0.0), 0)
    token, _, exceeds = _reaching(code, among, sums, sums > drawn, SLOTS)
    is_last = (b_lo == float("-inf")) if ALL_KEPT else (token == end)
    held = held & (token >= 0) & (above_b <= drawn) & (exceeds | is_last)
    return tl.where(held, id_of(token), -2)


@triton.jit(do_not_specialize=["wanted", "seed", "step"])
def choose(
    logits_ptr, uniform_ptr, work_ptr, output_ptr, wanted: tl.int64, seed: tl.int64, stride, vocab, step,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    KEPT: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr, FEW: tl.constexpr, SOME: tl.constexpr,
    MANY: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The token of each row, or -1 where none can be drawn."""
    wait(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    codes, exact, counts, ends, _, _, _, edges = room(work_ptr, row, WORDS, PARTS, KEPT, STEPS, COUNT)
    part = tl.arange(0, PARTS)
    top, _, nan = row_ends(ends, PARTS)
    number = tl.load(counts + part)
    most = tl.max(number, 0)
    count = tl.sum(number, 0)
    total = tl.sum(tl.load(exact + part), 0)
    above_a = tl.sum(tl.load(exact + PARTS + part), 0)
    above_b = tl.sum(tl.load(exact + 2 * PARTS + part), 0)
    a_lo, a_hi = tl.load(edges + 5), tl.load(edges + 6)
    b_lo, b_hi = tl.load(edges + 7), tl.load(edges + 8)
    u = uniform_number(uniform_ptr, row, step, seed, GIVEN)
    sound = (nan == 0.0) & (top > float("-inf")) & (top < float("inf"))
    found = tl.where(sound, -2, -1).to(tl.int64)
    near = (most <= KEPT).to(tl.int32)
    if sound & (most <= KEPT) & (count <= MANY):
        if count <= FEW:
            found = _among_few(
                codes, counts, count, top, total, above_a, above_b, a_lo, a_hi, b_lo, b_hi, u, wanted,
                BY_COUNT, ALL_KEPT, PARTS, FEW,
            )  # fmt: skip
        elif count <= SOME:
            found = _among_few(
                codes, counts, count, top, total, above_a, above_b, a_lo, a_hi, b_lo, b_hi, u, wanted,
                BY_COUNT, ALL_KEPT, PARTS, SOME,
            )  # fmt: skip
        else:
            found = _among_few(
                codes, counts, count, top, total, above_a, above_b, a_lo, a_hi, b_lo, b_hi, u, wanted,
                BY_COUNT, ALL_KEPT, PARTS, MANY,
            )  # fmt: skip
        near = near * 0
    while found == -2:
        # In the whole row nothing lies above, nor below.
        near_by = near != 0
        found = _drawn(
            near, codes, counts, logits_ptr + row * stride, vocab, tl.where(near_by, most * PARTS, vocab),
            top, total, tl.where(near_by, above_a, 0.0), tl.where(near_by, above_b, 0.0),
            tl.where(near_by, a_lo, float("-inf")), tl.where(near_by, a_hi, float("inf")),
            tl.where(near_by, b_lo, float("-inf")), tl.where(near_by, b_hi, float("inf")), u, wanted,
            BY_COUNT, ALL_KEPT, PARTS, WAYS, BLOCK,
        )  # fmt: skip
        near = near * 0
    tl.store(output_ptr + row, found)
