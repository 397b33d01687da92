# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""The last step of sampling: the token of each row, among those put aside or in the whole row.

`near` says which. Codes order tokens as they are drawn, so that a token is found by the sum of weights up to its code.
"""

import triton
import triton.language as tl

from .drawing import NO_TOKEN, code_of, id_of, last_above, logit_of, room, row_ends, uniform_number, wait_for_previous


@triton.jit
def _tokens(begin, near, codes, weights, counts, row_ptr, vocab, top, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes and weights of a block of tokens."""
    place = begin + tl.arange(0, BLOCK)
    if near:
        there = place // PARTS < tl.load(counts + place % PARTS)
        code = tl.load(codes + place, mask=there, other=NO_TOKEN)
        weight = tl.load(weights + place, mask=there, other=0.0)
    else:
        x = tl.load(row_ptr + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp(x.to(tl.float64) - top)
        code = tl.where(weight > 0.0, code_of(x, place), NO_TOKEN)
    return code, weight


@triton.jit
def _outermost(
    lo, hi, near, codes, weights, counts, row_ptr, vocab, extent, top, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The interval of codes `(lo, hi]`, cut down to the tokens there are in it. Without any, `hi` is -1."""
    first = tl.full([BLOCK], NO_TOKEN, tl.int64)
    last = tl.full([BLOCK], -1, tl.int64)
    for begin in range(0, extent, BLOCK):
        code, _ = _tokens(begin, near, codes, weights, counts, row_ptr, vocab, top, PARTS, BLOCK)
        among = (code > lo) & (code <= hi)
        first = tl.minimum(first, tl.where(among, code, NO_TOKEN))
        last = tl.maximum(last, tl.where(among, code, -1))
    return tl.min(first, 0) - 1, tl.max(last, 0)


@triton.jit
def _first(
    lo, hi, base, target, near, codes, weights, counts, row_ptr, vocab, extent, top,
    BY_COUNT: tl.constexpr, BEYOND: tl.constexpr, PARTS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first code in `(lo, hi]` with which the sum, `base` before it, reaches (or exceeds) the target, or else the last;
    and the sum before it."""
    way = tl.arange(0, WAYS).to(tl.int64) + 1
    lo, hi = _outermost(lo, hi, near, codes, weights, counts, row_ptr, vocab, extent, top, PARTS, BLOCK)
    while hi - lo > 1:
        bounds = lo + (hi - lo) * way // (WAYS + 1)
        sums = tl.zeros([WAYS, BLOCK], tl.float64)
        for begin in range(0, extent, BLOCK):
            code, weight = _tokens(begin, near, codes, weights, counts, row_ptr, vocab, top, PARTS, BLOCK)
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
        lo, hi = _outermost(lo, hi, near, codes, weights, counts, row_ptr, vocab, extent, top, PARTS, BLOCK)
    return hi, base


@triton.jit
def _weight_up_to(
    hi, near, codes, weights, counts, row_ptr, vocab, extent, top, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    sums = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, extent, BLOCK):
        code, weight = _tokens(begin, near, codes, weights, counts, row_ptr, vocab, top, PARTS, BLOCK)
        sums += tl.where(code <= hi, weight, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _drawn(
    near, codes, weights, counts, row_ptr, vocab, extent, top, total, above_a, above_b, a_lo, a_hi, b_lo, b_hi, u, wanted,
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
            near, codes, weights, counts, row_ptr, vocab, extent, top, BY_COUNT, False, PARTS, WAYS, BLOCK,
        )  # fmt: skip
        if BY_COUNT:
            reached = before + 1.0
            kept = _weight_up_to(end, near, codes, weights, counts, row_ptr, vocab, extent, top, PARTS, BLOCK)
        else:
            reached = before + tl.exp(logit_of(end).to(tl.float64) - top)
            kept = reached
        held = (end >= 0) & (above_a < target) & ((reached >= target) | (a_lo == float("-inf")))
    # One is exceeded by nothing, however sums are rounded.
    drawn = tl.where(u < 1.0, u * kept, float("inf"))
    token, before = _first(
        last_above(b_hi), tl.minimum(last_above(b_lo), end), above_b, drawn,
        near, codes, weights, counts, row_ptr, vocab, extent, top, False, True, PARTS, WAYS, BLOCK,
    )  # fmt: skip
    exceeds = before + tl.exp(logit_of(token).to(tl.float64) - top) > drawn
    is_last = (b_lo == float("-inf")) if ALL_KEPT else (token == end)
    held = held & (token >= 0) & (above_b <= drawn) & (exceeds | is_last)
    return tl.where(held | (near == 0), id_of(token), -2)


@triton.jit(do_not_specialize=["wanted", "seed", "step"])
def choose(
    logits_ptr, uniform_ptr, work_ptr, output_ptr, wanted: tl.int64, seed: tl.int64, stride, vocab, step,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, GIVEN: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    KEPT: tl.constexpr, STEPS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The token of each row, or -1 where none can be drawn."""
    row = tl.program_id(0).to(tl.int64)
    codes, weights, exact, counts, ends, _, _, _, edges = room(work_ptr, row, WORDS, PARTS, KEPT, STEPS)
    part = tl.arange(0, PARTS)
    wait_for_previous(EARLY)
    top, _, nan = row_ends(ends, PARTS)
    most = tl.max(tl.load(counts + part), 0)
    total = tl.sum(tl.load(exact + part), 0)
    above_a = tl.sum(tl.load(exact + PARTS + part), 0)
    above_b = tl.sum(tl.load(exact + 2 * PARTS + part), 0)
    a_lo, a_hi = tl.load(edges + 5), tl.load(edges + 6)
    b_lo, b_hi = tl.load(edges + 7), tl.load(edges + 8)
    u = uniform_number(uniform_ptr, row, step, seed, GIVEN)
    sound = (nan == 0.0) & (top > float("-inf")) & (top < float("inf"))
    found = tl.where(sound, -2, -1).to(tl.int64)
    near = (most <= KEPT).to(tl.int32)
    while found == -2:
        # In the whole row nothing lies above, nor below.
        near_by = near != 0
        found = _drawn(
            near, codes, weights, counts, logits_ptr + row * stride, vocab, tl.where(near_by, most * PARTS, vocab),
            top.to(tl.float64), total, tl.where(near_by, above_a, 0.0), tl.where(near_by, above_b, 0.0),
            tl.where(near_by, a_lo, float("-inf")), tl.where(near_by, a_hi, float("inf")),
            tl.where(near_by, b_lo, float("-inf")), tl.where(near_by, b_hi, float("inf")), u, wanted,
            BY_COUNT, ALL_KEPT, PARTS, WAYS, BLOCK,
        )  # fmt: skip
        near = near * 0
    tl.store(output_ptr + row, found)
