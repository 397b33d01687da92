# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""The last step of sampling: the token of each row, among those put aside or in the whole row.

`near` says which. Tokens put aside are in registers, by the order of their ids; a row is read anew for every sum.
"""

import triton
import triton.language as tl

from .drawing import _HIGHEST_KEY, _LOWEST_KEY, _key, _number, _row_ends, uniform_number
from .numerals import is_nan


@triton.jit
def _at_least(bound, near, key, weight, among, row_ptr, vocab, top, BLOCK: tl.constexpr):
    """How much weighs what reaches a key, and how many that are."""
    if near:
        take = among & (key >= bound)
        mass = tl.sum(tl.where(take, weight, 0.0), 0)
        count = tl.sum(take.to(tl.int32), 0)
    else:
        masses = tl.zeros([BLOCK], tl.float64)
        counts = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, vocab, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            take = (x > float("-inf")) & (_key(x) >= bound)
            masses += tl.where(take, tl.exp(x.to(tl.float64) - top), 0.0)
            counts += take.to(tl.int32)
        mass = tl.sum(masses, 0)
        count = tl.sum(counts, 0)
    return mass, count


@triton.jit
def _last_that_suffices(
    lo, hi, base, target, near, key, weight, among, row_ptr, vocab, top,
    BY_COUNT: tl.constexpr, BEYOND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key from `lo` to `hi` such that what reaches it, with `base`, reaches (or exceeds) the target."""
    while lo < hi:
        middle = ((lo.to(tl.int64) + hi.to(tl.int64) + 1) >> 1).to(tl.int32)
        mass, count = _at_least(middle, near, key, weight, among, row_ptr, vocab, top, BLOCK)
        if BY_COUNT:
            enough = count.to(tl.float64) >= target
        elif BEYOND:
            enough = base + mass > target
        else:
            enough = base + mass >= target
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle - 1)
    return lo


@triton.jit
def _lowest_with_weight(bound, near, key, weight, among, row_ptr, vocab, top, BLOCK: tl.constexpr):
    """The smallest key from `bound` on of a token that weighs anything."""
    if near:
        lowest = tl.min(tl.where(among & (key >= bound) & (weight > 0.0), key, _HIGHEST_KEY), 0)
    else:
        keys = tl.full([BLOCK], _HIGHEST_KEY, tl.int32)
        for begin in range(0, vocab, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            found = _key(x)
            take = (found >= bound) & (tl.exp(x.to(tl.float64) - top) > 0.0)
            keys = tl.minimum(keys, tl.where(take, found, _HIGHEST_KEY))
        lowest = tl.min(keys, 0)
    return lowest


@triton.jit
def _with_rank(wanted, rank, near, key, ids, among, row_ptr, vocab, BLOCK: tl.constexpr):
    """The id of the token of that rank, by id, among those with a key."""
    if near:
        equal = among & (key == wanted)
        order = tl.cumsum(equal.to(tl.int32), 0) - 1
        found = tl.sum(tl.where(equal & (order == rank), ids, 0), 0)
    else:
        before = tl.zeros([], tl.int32)
        found = tl.zeros([], tl.int32)
        for begin in range(0, vocab, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            equal = (x > float("-inf")) & (_key(x) == wanted)
            order = before + tl.cumsum(equal.to(tl.int32), 0) - 1
            found += tl.sum(tl.where(equal & (order == rank), column, 0), 0)
            before += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def _drawn(
    near, key, weight, ids, in_a, in_b, row_ptr, vocab, top, least, total, above_a, above_b, a_lo, b_lo, u, wanted,
    BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token a number draws, or -2 where those put aside do not hold it."""
    peak = top.to(tl.float64)
    near = near != 0
    # In the whole row nothing lies above.
    above_a = tl.where(near, above_a, 0.0)
    above_b = tl.where(near, above_b, 0.0)
    held = top > float("-inf")
    end = tl.full([], _LOWEST_KEY, tl.int32)
    end_weight = tl.zeros([], tl.float64)
    kept = total
    before_end = total
    end_count = tl.zeros([], tl.int32)
    if not ALL_KEPT:
        lo = tl.where(near, tl.min(tl.where(in_a, key, _HIGHEST_KEY), 0), _key(least))
        hi = tl.where(near, tl.max(tl.where(in_a, key, _LOWEST_KEY), 0), _key(top))
        if BY_COUNT:
            target = wanted.to(tl.float64)
        else:
            target = wanted.to(tl.float64, bitcast=True) * total
        mass, count = _at_least(lo, near, key, weight, in_a, row_ptr, vocab, peak, BLOCK)
        if BY_COUNT:
            reached = count.to(tl.float64) >= target
        else:
            reached = above_a + mass >= target
            held = held & (above_a < target)
        held = held & (lo <= hi) & (reached | (a_lo == float("-inf")))
        end = _last_that_suffices(
            lo, hi, above_a, target, near, key, weight, in_a, row_ptr, vocab, peak, BY_COUNT, False, BLOCK
        )
        end_weight = tl.exp(_number(end).to(tl.float64) - peak)
        mass, count = _at_least(end, near, key, weight, in_a, row_ptr, vocab, peak, BLOCK)
        more_mass, more_count = _at_least(end + 1, near, key, weight, in_a, row_ptr, vocab, peak, BLOCK)
        before_end = above_a + more_mass
        ties = count - more_count
        if BY_COUNT:
            end_count = (wanted - more_count).to(tl.int32)
        else:
            end_count = tl.minimum(tl.ceil((target - before_end) / end_weight), 2147483000.0).to(tl.int32)
            end_count = tl.where(before_end + (end_count - 1) * end_weight >= target, end_count - 1, end_count)
            end_count = tl.where(before_end + end_count * end_weight < target, end_count + 1, end_count)
        end_count = tl.maximum(tl.minimum(end_count, ties), 1)
        kept = before_end + end_count * end_weight

    drawn = u * kept
    after = in_b & (key > end)
    lo = tl.where(near, tl.min(tl.where(after, key, _HIGHEST_KEY), 0), tl.maximum(_key(least), end + 1))
    hi = tl.where(near, tl.max(tl.where(after, key, _LOWEST_KEY), 0), _key(top))
    mass, count = _at_least(lo, near, key, weight, after, row_ptr, vocab, peak, BLOCK)
    held = held & (above_b <= drawn)
    if above_b + mass > drawn:
        token = _last_that_suffices(
            lo, hi, above_b, drawn, near, key, weight, after, row_ptr, vocab, peak, False, True, BLOCK
        )
        mass, count = _at_least(token, near, key, weight, after, row_ptr, vocab, peak, BLOCK)
        base, more_count = _at_least(token + 1, near, key, weight, after, row_ptr, vocab, peak, BLOCK)
        base += above_b
        ties = count - more_count
        rank = tl.zeros([], tl.int32)
    elif end_weight > 0.0:
        held = held & (b_lo < _number(end))
        token = end
        base = before_end
        ties = end_count
        rank = tl.zeros([], tl.int32)
    else:
        # Beyond the sum: the last token that has any weight.
        held = held & (BY_COUNT | (b_lo == float("-inf")))
        token = _lowest_with_weight(end, near, key, weight, in_b, row_ptr, vocab, peak, BLOCK)
        mass, count = _at_least(token, near, key, weight, in_b, row_ptr, vocab, peak, BLOCK)
        base, more_count = _at_least(token + 1, near, key, weight, in_b, row_ptr, vocab, peak, BLOCK)
        ties = count - more_count
        rank = ties - 1
    size = tl.exp(_number(token).to(tl.float64) - peak)
    if rank == 0:
        # Of equals, the first with which the number is exceeded.
        rank = tl.minimum(tl.maximum(tl.floor((drawn - base) / size), 0.0), (ties - 1).to(tl.float64)).to(tl.int32)
        rank = tl.where(base + (rank + 1) * size <= drawn, rank + 1, rank)
        rank = tl.where((rank > 0) & (base + rank * size > drawn), rank - 1, rank)
    rank = tl.minimum(rank, ties - 1)
    among = in_a | in_b
    found = _with_rank(token, rank, near, key, ids, among, row_ptr, vocab, BLOCK).to(tl.int64)
    return tl.where(held | (near == 0), found, -2)


@triton.jit(do_not_specialize=["wanted", "seed", "step", "rows"])
def _finish(
    logits_ptr, uniform_ptr, ends_ptr, edges_ptr, exact_ptr, places_ptr, counts_ptr, output_ptr, wanted: tl.int64,
    seed: tl.int64, stride, vocab, step, rows,
    ROUNDS: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr, BY_COUNT: tl.constexpr, ALL_KEPT: tl.constexpr,
    GIVEN: tl.constexpr, SPLITS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    u = uniform_number(uniform_ptr, row, step, seed, GIVEN)
    slot = tl.arange(0, SIZE)
    if WHOLE:
        ids = slot
        x = tl.load(row_ptr + ids, mask=slot < vocab, other=float("-inf")).to(tl.float32)
        nan = tl.max(is_nan(x).to(tl.float32), 0)
        x = tl.where(is_nan(x), float("-inf"), x)
        top = tl.max(x, 0)
        in_a = x > float("-inf")
        least = tl.min(tl.where(in_a, x, float("inf")), 0)
        in_b = in_a
        a_lo = tl.full([], float("-inf"), tl.float32)
        b_lo = a_lo
        above_a = tl.zeros([], tl.float64)
        above_b = above_a
        near = tl.full([], 1, tl.int32)
    else:
        top, least, nan = _row_ends(ends_ptr, row, SPLITS)
        part = row * SPLITS + slot // KEPT
        there = slot % KEPT < tl.load(counts_ptr + part)
        ids = tl.load(places_ptr + part * KEPT + slot % KEPT, mask=there, other=0)
        x = tl.load(row_ptr + ids, mask=there, other=float("-inf")).to(tl.float32)
        edges = edges_ptr + (ROUNDS * rows + row) * 4
        a_lo = tl.load(edges)
        b_lo = tl.load(edges + 2)
        in_a = there & (x > a_lo) & (x <= tl.load(edges + 1))
        in_b = there & (x > b_lo) & (x <= tl.load(edges + 3))
        every = row * SPLITS + tl.arange(0, SPLITS)
        above_a = tl.sum(tl.load(exact_ptr + every * 3 + 1), 0)
        above_b = tl.sum(tl.load(exact_ptr + every * 3 + 2), 0)
        near = (tl.max(tl.load(counts_ptr + every), 0) <= KEPT).to(tl.int32)
    weight = tl.exp(x.to(tl.float64) - top.to(tl.float64))
    if WHOLE:
        total = tl.sum(weight, 0)
    else:
        total = tl.sum(tl.load(exact_ptr + every * 3), 0)
    sound = (nan == 0.0) & (top > float("-inf")) & (top < float("inf"))
    found = tl.where(sound, -2, -1).to(tl.int64)
    key = _key(x)
    while found == -2:
        found = _drawn(
            near, key, weight, ids, in_a, in_b, row_ptr, vocab, top, least, total, above_a, above_b, a_lo, b_lo, u,
            wanted, BY_COUNT, ALL_KEPT, BLOCK,
        )  # fmt: skip
        near = near * 0
    tl.store(output_ptr + row, found)
