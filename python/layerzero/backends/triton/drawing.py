# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""What the kernels of sampling share: the number of a row, the order of tokens, and the room they leave results in."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .numerals import is_nan

NO_TOKEN = tl.constexpr(1 << 60)
"""Beyond the code of every token."""


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The next kernel may be put on the device as soon as there is room, and waits there."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """What kernels before have written can be read from here on."""
    if EARLY:
        gdc_wait()


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


def words(parts: int, kept: int, steps: int) -> int:
    """How many float64 the room of a row takes."""
    return 2 * parts * kept + 4 * parts + (5 * parts + 2 * parts * steps + steps + 16) // 2


@triton.jit
def room(work_ptr, row, WORDS: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr, STEPS: tl.constexpr):
    """Where results about a row lie:

    - codes and weights of tokens put aside, up to `KEPT` of each part
    - for each part: the weight of all, and of what is above either interval; how many tokens were put aside
    - for each part: its largest number, its smallest finite one, whether it has a NaN, its highest step as a
      multiple, how far its steps are apart
    - for each part: the weight above the steps, and above the thresholds
    - the thresholds; the weight of all and the intervals, before and after the thresholds
    """
    slots: tl.constexpr = PARTS * KEPT
    weights = work_ptr + row * WORDS
    codes = (weights + slots).to(tl.pointer_type(tl.int64))
    exact = weights + 2 * slots
    counts = (exact + 3 * PARTS).to(tl.pointer_type(tl.int32))
    ends = (exact + 4 * PARTS).to(tl.pointer_type(tl.float32))
    steps = ends + 5 * PARTS
    sums = steps + PARTS * STEPS
    thresholds = sums + PARTS * STEPS
    return codes, weights, exact, counts, ends, steps, sums, thresholds, thresholds + STEPS


@triton.jit
def row_ends(ends, PARTS: tl.constexpr):
    """The largest number of a row, the smallest finite one, and whether there is a NaN."""
    part = tl.arange(0, PARTS)
    least = tl.min(tl.load(ends + PARTS + part), 0)
    return tl.max(tl.load(ends + part), 0), least, tl.max(tl.load(ends + 2 * PARTS + part), 0)
