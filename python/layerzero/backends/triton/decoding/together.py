# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of one new query per sequence over a paged cache, where sequences may begin with the same pages.

Some sequences are worked on together: as many blocks of threads as sequences, and every block has the queries of all of them
as rows. First the blocks divide among them the pages that the tables of these sequences begin with alike: a tile of keys
and values is read once for all rows. Then each block goes over the rest of one sequence, for the rows of that sequence.

The blocks find out by themselves which pages are alike. Nobody has to promise it, and a captured graph works with whatever its
tables hold later. Where none are, a block does what that of `paged.py` does, and stores the result itself.

With T sequences together and C common tokens, a key/value head reads C + sum(length - C) tokens for them instead of
sum(length), and a product has T times the rows.
"""

import torch
import triton
import triton.language as tl

from ..launching import power, processors
from ..overlapping import go_on
from .pages import look_at, slots_of
from .splitting import dot, give, weigh

# Columns of the tables that are compared at a time.
LOOK = 128
# Rows of a product, and the widest heads: with them four blocks of threads fit into the registers of a multiprocessor.
ROWS = 16
_WIDEST = 128
# Sequences together at most. The reads of a common beginning are divided by it: beyond 8 the rest of the sequences counts more.
_MOST = 8
# Blocks of threads for each multiprocessor from which the time is that of reading. With fewer it is that of waiting for memory.
_CROWD = 1.5
# Tokens a sequence has room for, from which a common beginning is worth looking for: a tile for each block.
_SHORTEST = 512


@triton.jit
def _alike(tables_ptr, mates, first, columns, t_batch, t_page, LOOK: tl.constexpr):
    """How many of the first `columns` columns are the same in the tables of all mates, from the first column on."""
    found = columns
    begin = columns * 0
    while begin < found:
        entry = begin + tl.arange(0, LOOK)
        place = entry.to(tl.int64) * t_page
        there = entry < found
        one = tl.load(tables_ptr + first * t_batch + place, mask=there, other=0)
        each = tl.load(tables_ptr + mates[:, None] * t_batch + place[None, :], mask=there[None, :], other=0)
        differ = (each != one[None, :]) & there[None, :]
        found = tl.min(tl.min(tl.where(differ, entry[None, :], found), 1), 0)
        begin += LOOK
    return found


@triton.jit
def _whole_or_zero(length, capacity):
    """A length; 0 for one that cannot be."""
    return tl.where((length >= 0) & (length <= capacity), length, 0).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "capacity", "parts", "lines", "group", "num_blocks", "t_batch"])
def attend_together(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, y_ptr, parts_ptr,
    batch, kv_heads, group, head_dim, capacity, parts, lines, num_blocks, scale, cap,
    q_batch, q_head, k_page, k_head, v_page, v_head, t_batch, t_page, l_batch,
    K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, ALIKE: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, LOOK: tl.constexpr, CAPPED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    go_on(OVERLAPS)
    # Neighbours read what lies side by side.
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    lane = tl.program_id(0) // kv_heads % TOGETHER
    part = tl.program_id(0) // kv_heads // TOGETHER % parts
    first = (tl.program_id(0) // kv_heads // TOGETHER // parts).to(tl.int64) * TOGETHER
    row, dim, tile = tl.arange(0, TOGETHER * HEADS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    mate, head = row // HEADS, row % HEADS
    some = (head < group) & (first + mate < batch)
    q_at = q_ptr + first * q_batch + kv_head * group * q_head
    q_at += mate.to(tl.int64)[:, None] * q_batch + head.to(tl.int64)[:, None] * q_head + dim[None, :]
    q = tl.load(q_at, mask=some[:, None] & (dim < head_dim)[None, :], other=0.0)

    # Where the batch ends, its last group is filled up with its first sequence.
    mates = first + tl.arange(0, TOGETHER)
    mates = tl.where(mates < batch, mates, first)
    least = tl.min(_whole_or_zero(tl.load(lens_ptr + mates * l_batch), capacity), 0)
    columns = _alike(tables_ptr, mates, first, tl.cdiv(least, PAGE), t_batch, t_page, LOOK)
    # Tiles that all of them share, and this block's; then those of its own sequence, and the end of that.
    common = tl.minimum(columns * PAGE, least) // TOKENS
    piece = lane * parts + part
    share = tl.cdiv(common, TOGETHER * parts)
    start = tl.minimum(piece * share, common)
    shared = tl.minimum(start + share, common) - start
    own = tl.where(first + lane < batch, first + lane, first)
    length = _whole_or_zero(tl.load(lens_ptr + own * l_batch), capacity)
    rest = tl.where(first + lane < batch, tl.cdiv(length, TOKENS) - common, 0)
    share = tl.cdiv(rest, parts)
    rest_start = common + tl.minimum(part * share, rest)
    rest = tl.minimum(rest_start + share, common + rest) - rest_start

    # What all of them share is in the table of each.
    tables_ptr += own * t_batch
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    top = tl.full([TOGETHER * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([TOGETHER * HEADS], tl.float32)
    y = tl.zeros([TOGETHER * HEADS, DIM], tl.float32)
    begin = tl.where(shared > 0, start, rest_start) * TOKENS
    page, lost = look_at(tables_ptr, begin, tile, length, num_blocks, t_page, TOKENS, PAGE)
    # Pages that cannot be, of all of them and of the own sequence.
    lost_by_all = lost & (shared > 0)
    for at in range(shared + rest):
        begin = tl.where(at < shared, start + at, rest_start + at - shared) * TOKENS
        there = begin + tile < length
        slot = slots_of(begin, tile, TOKENS, PAGE).to(tl.int64)
        k_at = (page * k_page + slot * K_SLOT)[:, None] + dim[None, :]
        v_at = k_at if ALIKE else (page * v_page + slot * V_SLOT)[:, None] + dim[None, :]
        read = there[:, None] & (dim < head_dim)[None, :]
        k = tl.load(k_ptr + k_at, mask=read, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + v_at, mask=read, other=0.0).to(q.dtype)
        seen = ((mate == lane) | (at < shared))[:, None] & there[None, :]
        weights, kept, top, total = weigh(dot(q, tl.trans(k), False), seen, top, total, scale, cap, CAPPED)
        y = y * kept[:, None] + dot(weights.to(q.dtype), v, False)
        # Looked up here, and not where it is used, it leaves all stages of the pipeline to keys and values.
        begin = tl.where(at + 1 < shared, start + at + 1, rest_start + at + 1 - shared) * TOKENS
        page, wrong = look_at(tables_ptr, begin, tile, length, num_blocks, t_page, TOKENS, PAGE)
        lost = lost | wrong
        lost_by_all = lost_by_all | (wrong & (at + 1 < shared))

    # Rows of a sequence whose pages or length cannot be are NaN.
    said = tl.load(lens_ptr + (first + mate) * l_batch, mask=some, other=0)
    lost, lost_by_all = lost.to(tl.int32), lost_by_all.to(tl.int32)
    if PAGE % TOKENS != 0:
        lost, lost_by_all = tl.max(lost, 0), tl.max(lost_by_all, 0)
    sound = (said >= 0) & (said <= capacity) & (lost_by_all == 0) & ((lost == 0) | (mate != lane))
    total = tl.where(sound, total, float("nan"))
    line = ((first + mate) * kv_heads + kv_head) * group + head
    pieces = TOGETHER * parts
    if (common == 0) & (parts == 1):
        # This block has all that there is of its sequence. A sum below zero says so to the join.
        give(y_ptr, y, top, total, line, some & (mate == lane), True, head_dim, 1, 0, lines, DIM, False)
        sums = parts_ptr + tl.cast(lines, tl.int64) * head_dim + (line * pieces + piece) * 2
        tl.store(sums, top, mask=some)
        tl.store(sums + 1, tl.where(mate == lane, -1.0, 0.0), mask=some)
    else:
        give(parts_ptr, y, top, total, line, some, True, head_dim, pieces, piece, lines, DIM, True)


def together_for(batch: int, kv_heads: int, group: int, dim: int, capacity: int, device: torch.device) -> int:
    """How many sequences are best worked on together; 1 for each by itself.

    As many as fill the 16 rows that a product has at least, so that rows cost nothing. On an H200, 64 requests with a common
    prefix of 1024 tokens take 38 µs instead of 52; where nothing is shared they take 87 µs instead of 79. So it is done only
    where prefixes are expected (`shared_prefixes`), and in batches whose reading takes long: with _CROWD blocks of threads for
    every multiprocessor or more, and room for _SHORTEST tokens.
    """
    if batch * kv_heads < _CROWD * processors(device) or capacity < _SHORTEST or dim > _WIDEST:
        return 1
    # Here, not above: what is above is also imported where there is no engine that has settings. And last: it takes 0.1 ms.
    from layerzero.loading import setting

    if not setting("shared_prefixes"):
        return 1
    return max(min(ROWS // power(group), _MOST, power(batch)), 1)
