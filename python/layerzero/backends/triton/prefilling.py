# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of packed queries over a paged cache: prompts, and chunks of prompts after what is in the cache already.

A block of threads has some queries of one sequence, for all query heads that share a key/value head, as the rows of its
products. It reads pages where they are, up to the last key that its queries see. Which sequence a block belongs to is found on
the device: with T queries to a block, the blocks of sequence s begin at starts[s] // T + s, so that rows // T + sequences
blocks are enough for any division of the rows among the sequences, and nothing waits for the device.

A page or length that cannot be gives NaN: to raise, the host would have to wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import factors_of, in_loads, is_loadable, loadable
from .decoding.pages import known, look_up, slots_of
from .decoding.splitting import tanh
from .launching import Launch, planned, power, shared_memory

# Numbers of a row of keys or values at least, padded: see `attention.py`.
_NARROWEST = 32


class Blocks(NamedTuple):
    """How the work is cut."""

    #: Rows of a block of threads: queries times the heads that share keys.
    rows: int
    #: Keys that are read at a time.
    keys: int
    warps: int
    #: Blocks of keys in shared memory: one in use, the others on their way.
    stages: int


@triton.jit
def _sequence_of(starts_ptr, block, batch, s_step, TOKENS: tl.constexpr):
    """The last sequence whose blocks begin at `block` or before; -1 for none."""
    low = block * 0
    high = low + batch
    while low < high:
        middle = (low + high) // 2
        begins = (tl.load(starts_ptr + middle.to(tl.int64) * s_step) // TOKENS).to(tl.int32) + middle
        low = tl.where(begins <= block, middle + 1, low)
        high = tl.where(begins <= block, high, middle)
    return low - 1


@triton.jit
def _go_over(
    first, end, q, y, top, total, k_ptr, v_ptr, tables_ptr, place, length, left, seen, num_blocks, scale, cap,
    k_page, v_page, t_page, K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Attends to the keys from `first`, a multiple of KEYS, to below `end`; BOUNDED where a bound runs through them.

    Keys before `seen` are behind every query's window. What lies in their place may be anything, and is not read: a weight of
    zero times NaN would be NaN.
    """
    key, dim = tl.arange(0, KEYS), tl.arange(0, DIM)
    page = look_up(tables_ptr, first, key, length, num_blocks, t_page, KEYS, PAGE)
    for start in range(first, end, KEYS):
        slot = slots_of(start, key, KEYS, PAGE).to(tl.int64)
        k_at = k_ptr + (page * k_page * 8 + slot * K_SLOT)[None, :] + dim[:, None]
        v_at = v_ptr + (page * v_page * 8 + slot * V_SLOT)[:, None] + dim[None, :]
        there = start + key < length
        if LEFT:
            there = there & (start + key >= seen)
        if BOUNDED:
            k = tl.load(k_at, mask=there[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        elif HEAD_DIM == DIM:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        scores = tl.dot(q, k)
        if CAP == 1:
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * scale))
        elif CAP == 2:
            scores = cap * tanh(scores * scale)
        if BOUNDED:
            inside = there[None, :]
            distance = (start + key)[None, :] - place[:, None]
            if LEFT:
                inside = inside & (distance >= -left)
            if CAUSAL:
                inside = inside & (distance <= 0)
            scores = tl.where(inside, scores, float("-inf"))
        # Without a cap the factor is applied along with the subtraction.
        if CAP == 0:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
        # Where all is minus infinity, any number will do.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if CAP == 0:
            weights = tl.exp2(scores * scale - base[:, None])
        else:
            weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        if BOUNDED:
            v = tl.load(v_at, mask=there[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == DIM:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        y = tl.dot(weights.to(v.dtype), v, y * kept[:, None])
        top = new_top
        # Looked up here, and not where it is used, it leaves all stages of the pipeline to keys and values.
        page = look_up(tables_ptr, start + KEYS, key, length, num_blocks, t_page, KEYS, PAGE)
    return y, top, total


@triton.jit(do_not_specialize=["rows", "batch", "blocks", "capacity", "num_blocks", "left"])
def _attend_prompts(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, starts_ptr, y_ptr,
    rows, batch, blocks, kv_heads, capacity, num_blocks, left, scale, cap,
    q_row, q_head, k_page, k_head, v_page, v_head, t_batch, t_page, l_batch, s_step,
    K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, SIGN: tl.constexpr, CAP: tl.constexpr,
    LEFT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP
    # The last queries first: under a causal bound they take longest.
    block = blocks - 1 - tl.program_id(0) % blocks
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)
    dim = tl.arange(0, DIM)
    token, head = tl.arange(0, ROWS) // GROUP, kv_head * GROUP + tl.arange(0, ROWS) % GROUP
    width = kv_heads * GROUP * HEAD_DIM

    # Rows of no sequence are zeros. So many blocks as there are reach all rows.
    row = block * TOKENS + token
    before = tl.load(starts_ptr)
    after = tl.load(starts_ptr + tl.cast(batch, tl.int64) * s_step)
    outside = (token < TOKENS) & (row < rows) & ((row < before) | (row >= after))
    y_at = y_ptr + row.to(tl.int64)[:, None] * width + head[:, None] * HEAD_DIM + dim[None, :]
    zeros = tl.zeros([ROWS, DIM], y_ptr.dtype.element_ty)
    tl.store(y_at, zeros, mask=outside[:, None] & (dim < HEAD_DIM)[None, :])

    sequence = _sequence_of(starts_ptr, block, batch, s_step, TOKENS)
    at = tl.maximum(sequence, 0).to(tl.int64)
    begins = tl.load(starts_ptr + at * s_step)
    ends = tl.load(starts_ptr + (at + 1) * s_step)
    own = block - (begins // TOKENS).to(tl.int32) - sequence
    begins, many = tl.minimum(tl.maximum(begins, 0), rows).to(tl.int32), (ends - begins).to(tl.int32)
    many = tl.minimum(many, rows - begins)
    if (sequence >= 0) & (own >= 0) & (own * TOKENS < many):
        said = tl.load(lens_ptr + at * l_batch)
        sound = (said >= 0) & (said <= capacity)
        length = tl.where(sound, said, 0).to(tl.int32)
        # Queries past the end are the last one again, and are not stored.
        query = tl.minimum(own * TOKENS + tl.minimum(token, TOKENS - 1), many - 1)
        # The key that a query is aligned with; the rows of a sequence are its last positions.
        place = query + (length - many)
        lowest = own * TOKENS + (length - many)
        highest = tl.minimum(own * TOKENS + TOKENS, many) - 1 + (length - many)
        q_at = q_ptr + (begins + query).to(tl.int64)[:, None] * q_row * 8 + (head * q_head * 8)[:, None] + dim[None, :]
        q = tl.load(q_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        # The factor of scores is positive: their largest is found before they are multiplied.
        if SIGN != 1:
            q = (q * SIGN).to(q_ptr.dtype.element_ty)
        # Keys from `low` to below `high` are reached by some query, those from `all_low` to below `all_high` by all of them.
        low = length * 0
        high = length
        all_low = low
        all_high = length
        if LEFT:
            low = tl.maximum(lowest - left, 0) // KEYS * KEYS
            all_low = tl.maximum(highest - left + KEYS - 1, 0) // KEYS * KEYS
        if CAUSAL:
            high = tl.minimum(tl.maximum(highest + 1, 0), length)
            all_high = tl.minimum(tl.maximum(lowest + 1, 0), length)
        all_low = tl.minimum(tl.maximum(all_low, low), tl.maximum(high, low))
        all_high = tl.minimum(tl.maximum(all_high // KEYS * KEYS, all_low), tl.maximum(high // KEYS * KEYS, all_low))

        table = tables_ptr + at * t_batch
        # Pages behind the window need not be there any more.
        seen = tl.maximum(lowest - left, 0) if LEFT else low
        sound = sound & known(table, seen, high, num_blocks, t_page, PAGE)
        keys, values = k_ptr + kv_head * k_head * 8, v_ptr + kv_head * v_head * 8
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        y = tl.zeros([ROWS, DIM], tl.float32)
        if LEFT:
            y, top, total = _go_over(
                low, all_low, q, y, top, total, keys, values, table, place, length, left, seen, num_blocks, scale, cap,
                k_page, v_page, t_page, K_SLOT, V_SLOT, PAGE, HEAD_DIM, KEYS, DIM, CAP, LEFT, CAUSAL, True,
            )  # fmt: skip
        y, top, total = _go_over(
            all_low, all_high, q, y, top, total, keys, values, table, place, length, left, seen, num_blocks, scale, cap,
            k_page, v_page, t_page, K_SLOT, V_SLOT, PAGE, HEAD_DIM, KEYS, DIM, CAP, LEFT, CAUSAL, False,
        )  # fmt: skip
        y, top, total = _go_over(
            all_high, high, q, y, top, total, keys, values, table, place, length, left, seen, num_blocks, scale, cap,
            k_page, v_page, t_page, K_SLOT, V_SLOT, PAGE, HEAD_DIM, KEYS, DIM, CAP, LEFT, CAUSAL, True,
        )  # fmt: skip
        # Nothing to attend to gives zeros.
        y = tl.where(total[:, None] == 0.0, 0.0, y / total[:, None])
        y = tl.where(sound, y, float("nan"))
        stored = (token < TOKENS) & (own * TOKENS + token < many)
        y_at = y_ptr + (begins + query).to(tl.int64)[:, None] * width + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=stored[:, None] & (dim < HEAD_DIM)[None, :])


def blocks_for(group: int, width: int, queries: int, shared: int) -> Blocks:
    """Blocks for heads padded to `width` numbers and sequences of `queries` queries, on average.

    `shared`: bytes of shared memory that a block of threads may have; queries lie there, and keys and values of each stage.
    Twice the rows read keys and values half as often, but rows without a query are computed all the same.
    """
    rows = max(64 if queries * group <= 64 else 128, power(group))
    best = Blocks(rows, 64, 4 if rows == 64 else 8, 3 if width <= 128 else 2)
    while best.rows * width * 2 + best.stages * best.keys * 4 * width > shared:
        if best.stages > 2:
            best = best._replace(stages=best.stages - 1)
        elif best.keys > 16:
            best = best._replace(keys=best.keys // 2)
        elif best.rows > max(64, power(group)):
            best = best._replace(rows=best.rows // 2, warps=4)
        else:
            break
    return best


@planned
def prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Any:
    """Packed queries over pages."""
    given = (query, key_cache, value_cache)
    copied = [not is_loadable(one) for one in given]
    if any(copied):
        # What cannot be loaded 16 bytes at a time is copied.
        rest = (block_tables, context_lens, cu_seqlens_q)

        def call_copied(*tensors: Tensor) -> Any:
            whole = [loadable(one) if copy else one for one, copy in zip(tensors[:3], copied, strict=True)]
            return prefill(*whole, *tensors[3:], causal, scale, window_left, softcap, layout)

        return call_copied, (*given, *rest)
    rows, heads, head_dim = query.shape
    slots, kv = (2, 1) if layout == "HND" else (1, 2)
    kv_heads, block_size, batch = key_cache.shape[kv], key_cache.shape[slots], context_lens.shape[0]
    if query.numel() == 0 or kv_heads == 0 or batch == 0:
        return torch.zeros_like, (query,)
    device, dim, group = query.device, power(max(head_dim, _NARROWEST)), heads // kv_heads
    cut = blocks_for(group, dim, -(-rows // batch), shared_memory(device))
    number = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    sign, factor, cap, capping = factors_of(number, float(softcap), False)
    blocks = rows // (cut.rows // group) + batch
    capacity = block_tables.shape[1] * block_size
    launch = Launch(
        _attend_prompts,
        blocks * kv_heads,
        device,
        (
            *(rows, batch, blocks, kv_heads, capacity, key_cache.shape[0], min(window_left, capacity), factor, cap),
            *in_loads(query.stride(0), query.stride(1), key_cache.stride(0), key_cache.stride(kv)),
            *in_loads(value_cache.stride(0), value_cache.stride(kv)),
            *(*block_tables.stride(), context_lens.stride(0), cu_seqlens_q.stride(0)),
        ),
        (
            *(key_cache.stride(slots), value_cache.stride(slots), block_size, group, head_dim, cut.rows, cut.keys, dim),
            *(sign, capping, window_left >= 0, causal),
        ),
        cut.warps,
        cut.stages,
    )

    def call(*tensors: Tensor) -> Tensor:
        output = torch.empty((rows, heads, head_dim), dtype=tensors[0].dtype, device=device)
        launch(*tensors, output)
        return output

    return call, (*given, block_tables, context_lens, cu_seqlens_q)


KERNELS: dict[str, Callable[..., Any]] = {"triton.paged.prefill": prefill, "triton.paged.prefill.gqa": prefill}
