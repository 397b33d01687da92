# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""One query over a long context: the context is cut into parts that are attended to side by side, and joined.

A part leaves the sum of its weighted values, its largest score and the sum of its weights; the join brings them to the
largest score of all. Sums are formed in an order that depends on sizes, lengths and shared pages alone. Scores are powers of two: what
a score is multiplied by holds log2(e).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch, power, processors, shared_memory
from ..overlapping import overlaps, wait

_LOG2E = math.log2(math.e)
# What a block of threads costs before its first tile, and the join, in tiles.
_LEAD = 3
_JOIN = 5
MOST_PARTS = 64
# Bytes of shared memory that four stages of the widest tiles take.
_LONG_PIPELINE = 120 << 10
# How much of a row one block of the join takes.
_WIDTH = 128


@triton.jit
def tanh(x):
    # 2 sigmoid(2 x) - 1 cancels where x is small: there its series is exact.
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869488))))
    return tl.where(square < 0.0625, series, 2.0 / (1.0 + tl.exp2(x * -2.8853900817779268)) - 1.0)


@triton.jit
def place(blocks, kv_heads, parts):
    """A program's block of heads, key/value head, part of the context and sequence. Neighbours read what lies side by side."""
    block = tl.program_id(0) % blocks
    kv_head = (tl.program_id(0) // blocks % kv_heads).to(tl.int64)
    part = tl.program_id(0) // blocks // kv_heads % parts
    batch = (tl.program_id(0) // blocks // kv_heads // parts).to(tl.int64)
    return block, kv_head, part, batch


@triton.jit
def weigh(scores, there, top, total, scale, cap, CAPPED: tl.constexpr):
    """Scores of a tile as weights; of keys that are not `there`, none. Returns them, what is kept of the sums before, the
    largest score and the sum of all."""
    scores *= scale
    if CAPPED:
        scores = cap * tanh(scores)
    scores = tl.where(there, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Where all is minus infinity, any number will do.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    return weights, kept, new_top, total * kept + tl.sum(weights, 1)


@triton.jit
def dot(a, b, EXACT: tl.constexpr):
    """A product; exact ones keep all bits of float32."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def give(y_ptr, y, top, total, line, some, sound, width, parts, part, lines,
         WIDTH: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """Stores what a part has for the rows `line`: the result, or what the join needs. What is not sound is NaN."""
    column = tl.arange(0, WIDTH)
    inside = some[:, None] & (column < width)[None, :]
    if SPLIT:
        place = line * parts + part
        sums = y_ptr + tl.cast(lines, tl.int64) * width + place * 2
        tl.store(y_ptr + place[:, None] * width + column[None, :], y, mask=inside & (total != 0.0)[:, None])
        tl.store(sums, top, mask=some)
        tl.store(sums + 1, tl.where(sound, total, float("nan")), mask=some)
    else:
        # Nothing to attend to gives zeros.
        y = tl.where(total[:, None] == 0.0, 0.0, y / total[:, None])
        y = tl.where(sound, y, float("nan"))
        tl.store(y_ptr + line[:, None] * width + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts", "lines"])
def _join(parts_ptr, y_ptr, width, pieces, parts, lines,
          PARTS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):  # fmt: skip
    wait(OVERLAPS)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * WIDTH + tl.arange(0, WIDTH)
    part = tl.arange(0, PARTS)
    place = row * parts + part
    sums = parts_ptr + tl.cast(lines, tl.int64) * width + place * 2
    top = tl.load(sums, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + 1, mask=part < parts, other=0.0)
    # A sum below zero: who gave it has stored the whole result.
    is_whole = tl.max((total < 0.0).to(tl.int32), 0) != 0
    # Parts that are empty have no largest score, and nothing was stored for them; a NaN is one all the same.
    filled = (total != 0.0) & (is_whole == 0)
    share = tl.where(filled, tl.exp2(top - tl.max(tl.where(filled, top, float("-inf")), 0)), 0.0)
    there = filled[:, None] & (column < width)[None, :]
    y = tl.load(parts_ptr + place[:, None] * width + column[None, :], mask=there, other=0.0)
    whole = tl.sum(total * share, 0)
    y = tl.sum(y * share[:, None], 0)
    y = tl.where(whole == 0.0, 0.0, y / whole)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=(column < width) & (is_whole == 0))


@lru_cache(maxsize=4096)
def parts_for(blocks: int, tiles: int, device: torch.device, resident: int = 2, weight: float = 0.0) -> int:
    """Into how many parts a context of so many tiles is best cut, when each part takes so many blocks of threads.

    A multiprocessor holds `resident` blocks at a time. One on each already keeps it or the memory busy: more of them take
    longer. What a block leaves for the join weighs as much as `weight` tiles.
    """
    many = processors(device)

    def cost(parts: int) -> float:
        waves, rest = divmod(blocks * parts, resident * many)
        slowness = float(resident * waves) + (max(rest / many, 1.0) if rest else 0.0)
        join = _JOIN + blocks * parts * weight / many if parts > 1 else 0.0
        return -(-tiles // parts) * slowness + _LEAD * (waves + (rest > 0)) + join

    return min(range(1, max(min(tiles, MOST_PARTS), 1) + 1), key=cost)


def rows_for(group: int, exact: bool, width: int) -> int:
    """How many of the query heads that share a key/value head are the rows of one product."""
    most = 16 if exact and width > 128 else 32
    return min(max(power(group), 16), most)


def tiling(exact: bool, width: int, blocks: int, device: torch.device) -> tuple[int, int, int]:
    """Tokens of a tile of keys and values of such a width, warps, and stages of the pipeline.

    Several blocks on a multiprocessor hide what each of them waits for, and shorter pipelines let more of them in; a
    single one needs a long pipeline.
    """
    if exact:
        return 32, 8, 2
    crowd = blocks / processors(device)
    long = 4 if shared_memory(device) >= _LONG_PIPELINE else 3
    return 32 if width > 128 else 64, 4, 2 if crowd >= 2.0 else long if crowd >= 0.5 else 3


def factors(scale: float, softcap: float) -> tuple[float, float]:
    """What scores are multiplied by before the cap and after."""
    return (scale / softcap, softcap * _LOG2E) if softcap else (scale * _LOG2E, 0.0)


def attention(
    attend: Launch, query: Tensor, width: int, parts: int, *, may_be_whole: bool = False
) -> Callable[..., Tensor]:
    """The call of a kernel that takes a query and other tensors and gives parts: with the memory for them, and the join.

    The result is of the query's shape, but for its last dimension. A kernel that stores rows of it by itself, where it has
    them whole, is given both.
    """
    device, dtype, shape = query.device, query.dtype, (*query.shape[:-1], width)
    if parts == 1:

        def whole(*tensors: Tensor) -> Tensor:
            output = torch.empty(shape, dtype=dtype, device=device)
            attend(*tensors, output)
            return output

        return whole
    rows, pieces = math.prod(shape[:-1]), -(-width // _WIDTH)
    lines, overlap = rows * parts, overlaps(device)
    constants = (power(parts), min(power(width), _WIDTH), overlap)
    join = Launch(_join, rows * pieces, device, (width, pieces, parts, lines), constants, overlaps=overlap)
    room = lines * (width + 2)

    def call(*tensors: Tensor) -> Tensor:
        output = torch.empty(shape, dtype=dtype, device=device)
        partial = torch.empty(room, dtype=torch.float32, device=device)
        if may_be_whole:
            attend(*tensors, output, partial)
        else:
            attend(*tensors, partial)
        join(partial, output)
        return output

    return call
