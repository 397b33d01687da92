# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""What the kernels of sampling share: the number of a row, the order of tokens, and the room they leave results in."""

import triton
import triton.language as tl

from ..numerals import is_nan

NO_TOKEN = tl.constexpr(1 << 60)
"""Beyond the code of every token."""


@triton.jit
def uniform_number(uniform_ptr, row, step, seed, GIVEN: tl.constexpr):
    """The number of a row, as float64 within 0 to 1: the one given, or the one of the seed."""
    if GIVEN:
        u = within(tl.load(uniform_ptr + row * step).to(tl.float64))
    else:
        u = number_of_seed(seed, row)
    return u


@triton.jit
def within(u):
    """A number within 0 to 1. A NaN is exceeded by nothing, as a number beyond all."""
    return tl.minimum(tl.maximum(tl.where(is_nan(u), 1.0, u), 0.0), 1.0)


@triton.jit
def number_of_seed(seed, counter):
    """A number of the SplitMix64 stream of a seed, from 0 to below 1."""
    golden = 0x9E3779B97F4A7C15
    z = _mixed(_mixed(seed.to(tl.uint64) + golden) + (counter + 1).to(tl.uint64) * golden)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def weight_of(x, top):
    """`exp(x - top)` in float64, for `x` not above `top`, to about 1e-14: half of what the usual one costs."""
    way = tl.maximum(x.to(tl.float64) - top.to(tl.float64), -800.0)
    # The nearest whole number of halvings, read off the low bits of a sum.
    shifted = way * 1.4426950408889634 + 6755399441055744.0
    halvings = shifted - 6755399441055744.0
    rest = halvings * -1.9082149292705877e-10 + (halvings * -0.6931471803691238 + way)
    series = rest * 2.505210838544172e-08 + 2.755731922398589e-07
    series = series * rest + 2.7557319223985893e-06
    series = series * rest + 2.48015873015873e-05
    series = series * rest + 1.984126984126984e-04
    series = series * rest + 1.388888888888889e-03
    series = series * rest + 8.333333333333333e-03
    series = series * rest + 4.1666666666666664e-02
    series = series * rest + 1.6666666666666666e-01
    series = series * rest + 0.5
    series = series * rest + 1.0
    series = series * rest + 1.0
    # In two factors, as the least weights have exponents that a factor cannot have.
    power = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    half = power >> 1
    return series * _power_of_two(half) * _power_of_two(power - half)


@triton.jit
def last_weightless(top):
    """The largest logit that weighs nothing."""
    bound = top.to(tl.float64) - 745.1332191019411
    x = bound.to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    below = tl.where(x > 0.0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    return tl.where((x.to(tl.float64) > bound) | (x >= top), below, x)


@triton.jit
def _power_of_two(power):
    return ((power + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def code_of(x, ids):
    """An integer that orders tokens as draws do: by falling logit, then by id, of 24 bits. Both zeros are the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return ((0x7FFFFFFF - key.to(tl.int64)) << 24) | ids


@triton.jit
def last_above(x):
    """The last code of a logit above a number."""
    return code_of(x, 0) - 1


@triton.jit
def logit_of(code):
    key = (0x7FFFFFFF - (code >> 24)).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def id_of(code):
    return code & 0xFFFFFF


def words(parts: int, kept: int, steps: int, count: int) -> int:
    """How many float64 the room of a row takes."""
    return parts * kept + 4 * parts + (5 * parts + parts * (steps + count) + count + 16) // 2


@triton.jit
def room(
    work_ptr, row,
    WORDS: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Where results about a row lie:

    - codes of tokens put aside, up to `KEPT` of each part
    - for each part: the weight of all, and of what is above either interval; how many tokens were put aside
    - for each part: its largest number, its smallest finite one, whether it has a NaN, its highest step as a
      multiple, how far its steps are apart
    - for each part: the weight above the steps, and above the thresholds
    - the thresholds; the weight of all and the intervals, before and after the thresholds
    """
    begin = work_ptr + row * WORDS
    codes = begin.to(tl.pointer_type(tl.int64))
    exact = begin + PARTS * KEPT
    counts = (exact + 3 * PARTS).to(tl.pointer_type(tl.int32))
    ends = (exact + 4 * PARTS).to(tl.pointer_type(tl.float32))
    steps = ends + 5 * PARTS
    sums = steps + PARTS * STEPS
    thresholds = sums + PARTS * COUNT
    return codes, exact, counts, ends, steps, sums, thresholds, thresholds + COUNT


@triton.jit
def row_ends(ends, PARTS: tl.constexpr):
    """The largest number of a row, the smallest finite one, and whether there is a NaN."""
    part = tl.arange(0, PARTS)
    least = tl.min(tl.load(ends + PARTS + part), 0)
    return tl.max(tl.load(ends + part), 0), least, tl.max(tl.load(ends + 2 * PARTS + part), 0)
