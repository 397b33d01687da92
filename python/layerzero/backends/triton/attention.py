# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Dense attention of many queries: scores, caps and masks stay in registers, and nothing but the result is stored.

A block of threads has a block of queries of one head and goes over the keys, a block at a time. Keys that no query of
the block can reach are not read: those beyond the causal bound or the window, and those at either end that a boolean mask
leaves out. Only the blocks of keys that a bound runs through are compared with it.

Scores are powers of two, so that their factor holds log2(e). Under a mask that is added they are powers of e: numbers such
as float32's smallest, which some models add for "not this key", would be infinite in powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decoding.splitting import tanh
from .launching import Launch, UntraceableError, aligned, is_traced, planned, power, shared_memory

_LOG2E = math.log2(math.e)
# Numbers of 16 bits in the 16 bytes that are loaded at once.
_LOAD = 8
# Numbers of a row of keys or values at least, padded. On an H200, Triton 3.6 gave wrong products with rows of 16 that it did not
# copy ahead of their use.
_NARROWEST = 32
# The smallest normal float32: a smaller scale gives scores of 0.
_TINY = 2.0**-126
# Up to this cap, 1 - 2 / (1 + e^2x) for tanh is off by less than 1e-4 in a score; above it small scores would be lost.
_NEAR = 256.0
# Bytes of keys and values that blocks running at the same time should share: half of an H200's second-level cache.
_SHARED_BYTES = 24 << 20
_NONE, _BOOL, _ADDED = 0, 1, 2
_UNCAPPED, _NEARLY, _WIDELY = 0, 1, 2


class Blocks(NamedTuple):
    """How the work is cut."""

    #: Queries of a block of threads.
    rows: int
    #: Keys that are read at a time.
    keys: int
    warps: int
    #: Blocks of keys in shared memory: one in use, the others on their way.
    stages: int
    #: Keys of a boolean mask that are looked at at a time, for ends to leave out: a multiple of `keys`, or 0 for none.
    span: int = 256


@triton.jit
def _mask_tile(at, row, key, mask_row, mask_key, end, other, SHARED: tl.constexpr, BOUNDED: tl.constexpr):
    """What the mask has for some keys: for each query, or one row for all of them."""
    if SHARED:
        place = (at + key * mask_key)[None, :]
    else:
        place = at + row.to(tl.int64)[:, None] * mask_row + (key * mask_key)[None, :]
    if BOUNDED:
        return tl.load(place, mask=(key < end)[None, :], other=other)
    else:
        return tl.load(place)


@triton.jit
def _none_allowed(at, row, first, seq_k, mask_row, mask_key, SPAN: tl.constexpr, SHARED: tl.constexpr):
    """Whether a boolean mask leaves out a span of keys for every query of the block."""
    key = tl.arange(0, SPAN)
    at += first.to(tl.int64) * mask_key
    tile = _mask_tile(at, row, key, mask_row, mask_key, seq_k - first, 0, SHARED, True)
    return tl.max(tl.max(tile.to(tl.int32), 1), 0) == 0


@triton.jit
def _go_over(
    first, end, q, y, top, total, k_ptr, v_ptr, mask_ptr, row, place, seq_k, left, right, scale, cap, mask_row, mask_key,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, V_WIDTH: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Attends to the keys from `first` to below `end`; BOUNDED where a bound runs through them."""
    key, dim, column = tl.arange(0, KEYS), tl.arange(0, DIM), tl.arange(0, V_DIM)
    k_key, v_key = key, key
    if KEYS * K_TOKEN >= 1 << 31:
        k_key = key.to(tl.int64)
    if KEYS * V_TOKEN >= 1 << 31:
        v_key = key.to(tl.int64)
    begin = first.to(tl.int64)
    k_ptr += begin * K_TOKEN
    v_ptr += begin * V_TOKEN
    if MASK != 0:
        mask_ptr += begin * mask_key
    for start in range(first, end, KEYS):
        k_at = k_ptr + k_key[None, :] * K_TOKEN + dim[:, None]
        v_at = v_ptr + v_key[:, None] * V_TOKEN + column[None, :]
        there = key < seq_k - start
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
        elif MASK == 2:
            scores *= scale
        if MASK == 1:
            allowed = _mask_tile(mask_ptr, row, key, mask_row, mask_key, seq_k - start, 0, SHARED, BOUNDED)
            scores = tl.where(allowed != 0, scores, float("-inf"))
        elif MASK == 2:
            bias = _mask_tile(mask_ptr, row, key, mask_row, mask_key, seq_k - start, 0.0, SHARED, BOUNDED)
            bias = bias.to(tl.float32)
            # Where minus infinity is added there is no weight, even of a NaN.
            scores = tl.where(bias == float("-inf"), float("-inf"), scores + bias)
        if BOUNDED:
            inside = there[None, :]
            distance = (start + key)[None, :] - place[:, None]
            if LEFT:
                inside = inside & (distance >= -left)
            if RIGHT:
                inside = inside & (distance <= right)
            scores = tl.where(inside, scores, float("-inf"))
        # Neither a cap nor a bias: the factor is applied along with the subtraction.
        if CAP == 0 and MASK != 2:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
        # Where all is minus infinity, any number will do.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if MASK == 2:
            weights = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
            kept = tl.exp2((top - base) * 1.4426950408889634)
        elif CAP == 0:
            weights = tl.exp2(scores * scale - base[:, None])
            kept = tl.exp2(top - base)
        else:
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        if BOUNDED:
            v = tl.load(v_at, mask=there[:, None] & (column < V_WIDTH)[None, :], other=0.0)
        elif V_WIDTH == V_DIM:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(column < V_WIDTH)[None, :], other=0.0)
        y = tl.dot(weights.to(v.dtype), v, y * kept[:, None])
        top = new_top
        k_ptr += KEYS * K_TOKEN
        v_ptr += KEYS * V_TOKEN
        if MASK != 0:
            mask_ptr += KEYS * mask_key
    return y, top, total


@triton.jit(do_not_specialize=["lines", "heads", "group", "together", "blocks", "seq_q", "left", "right"])
def _attend(
    q_ptr, k_ptr, v_ptr, mask_ptr, y_ptr,
    lines, heads, group, together, blocks, seq_q, seq_k, left, right, scale, cap,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, y_batch, y_head,
    mask_batch, mask_head, mask_row, mask_key,
    Q_TOKEN: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, Y_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr, SIGN: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
    SHARED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    # Launched by compiled code, numbers come as float64.
    scale, cap = tl.cast(scale, tl.float32), tl.cast(cap, tl.float32)
    # Heads whose keys fit into the cache together, and of those the last queries first: under a causal bound they take longest.
    crowd = tl.program_id(0) // (together * blocks)
    within = tl.program_id(0) % (together * blocks)
    many = tl.minimum(together, lines - crowd * together)
    block = blocks - 1 - within // many
    line = crowd * together + within % many
    batch, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    first_row = block * ROWS
    # Queries past the end are the last one again, and are not stored.
    row = tl.minimum(tl.arange(0, ROWS), seq_q - 1 - first_row)
    # The key a query is aligned with.
    place = first_row + row + (seq_k - seq_q)
    lowest = first_row + (seq_k - seq_q)

    begin = first_row.to(tl.int64)
    dim, column = tl.arange(0, DIM), tl.arange(0, V_DIM)
    q_at = q_ptr + (batch * q_batch + head * q_head) * 8 + begin * Q_TOKEN
    q_at = q_at + row.to(tl.int64)[:, None] * Q_TOKEN + dim[None, :]
    if HEAD_DIM == DIM:
        q = tl.load(q_at)
    else:
        q = tl.load(q_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    # The factor of scores is positive: their largest is found before they are multiplied.
    if SIGN != 1:
        q = (q * SIGN).to(q_ptr.dtype.element_ty)
    k_ptr += (batch * k_batch + head // group * k_head) * 8
    v_ptr += (batch * v_batch + head // group * v_head) * 8
    if MASK != 0:
        mask_ptr += batch * mask_batch + head * mask_head + begin * mask_row

    # Keys from `low` to below `high` are reached by some query, those from `all_low` to below `all_high` by all of them.
    low = first_row * 0
    high = seq_k + low
    all_low = low
    all_high = high
    if LEFT:
        low = tl.maximum(lowest - left, 0) // KEYS * KEYS
        all_low = tl.maximum(lowest + ROWS - 1 - left + KEYS - 1, 0) // KEYS * KEYS
    if RIGHT:
        high = tl.minimum(tl.maximum(lowest + ROWS + right, 0), seq_k)
        all_high = tl.minimum(tl.maximum(lowest + right + 1, 0), seq_k)
    if MASK == 1 and SPAN > 0:
        seeking = low < high
        while seeking:
            last = low + (high - low - 1) // SPAN * SPAN
            empty = _none_allowed(mask_ptr, row, last, seq_k, mask_row, mask_key, SPAN, SHARED)
            high = tl.where(empty, last, high)
            seeking = empty & (low < high)
        seeking = low < high
        while seeking:
            empty = _none_allowed(mask_ptr, row, low, seq_k, mask_row, mask_key, SPAN, SHARED)
            low = tl.where(empty, low + SPAN, low)
            seeking = empty & (low < high)
    all_low = tl.minimum(tl.maximum(all_low, low), tl.maximum(high, low))
    all_high = tl.minimum(tl.maximum(all_high // KEYS * KEYS, all_low), tl.maximum(high // KEYS * KEYS, all_low))

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, V_DIM], tl.float32)
    if LEFT:
        y, top, total = _go_over(
            low, all_low, q, y, top, total, k_ptr, v_ptr, mask_ptr, row, place, seq_k, left, right, scale, cap,
            mask_row, mask_key, K_TOKEN, V_TOKEN, HEAD_DIM, V_WIDTH, KEYS, DIM, V_DIM, CAP, MASK, SHARED,
            LEFT, RIGHT, True,
        )  # fmt: skip
    y, top, total = _go_over(
        all_low, all_high, q, y, top, total, k_ptr, v_ptr, mask_ptr, row, place, seq_k, left, right, scale, cap,
        mask_row, mask_key, K_TOKEN, V_TOKEN, HEAD_DIM, V_WIDTH, KEYS, DIM, V_DIM, CAP, MASK, SHARED,
        LEFT, RIGHT, False,
    )  # fmt: skip
    y, top, total = _go_over(
        all_high, high, q, y, top, total, k_ptr, v_ptr, mask_ptr, row, place, seq_k, left, right, scale, cap,
        mask_row, mask_key, K_TOKEN, V_TOKEN, HEAD_DIM, V_WIDTH, KEYS, DIM, V_DIM, CAP, MASK, SHARED,
        LEFT, RIGHT, True,
    )  # fmt: skip

    # Nothing to attend to gives zeros.
    y = tl.where(total[:, None] == 0.0, 0.0, y / total[:, None])
    line_at = tl.arange(0, ROWS)
    stored = (line_at < seq_q - first_row)[:, None] & (column < V_WIDTH)[None, :]
    y_at = y_ptr + batch * y_batch + head * y_head + begin * Y_TOKEN
    y_at = y_at + line_at.to(tl.int64)[:, None] * Y_TOKEN + column[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=stored)


def blocks_for(width: int, seq_q: int, mask: int, shared: int) -> Blocks:
    """Blocks for heads padded to `width` numbers and `seq_q` queries; `bench/gpu/attention_blocks.py` times others.

    `mask`: bytes of a mask for each score, or 0 where one row is for all queries. `shared`: bytes of shared memory that a
    block of threads may have; queries lie there, and for each stage keys, values and the mask. On an H200, 64 queries are best
    up to 128 numbers (causal 1.10 times as fast as 128 queries, padded 1.5), but for a mask that each query has a row of.
    """
    if width <= 64 or (width <= 128 and not mask):
        best = Blocks(64, 64, 4, 3)
    elif width <= 128:
        best = Blocks(128, 64, 8, 3)
    else:
        best = Blocks(128, 64, 8, 2)
    if seq_q <= 64:
        # Rows past the last query would be computed all the same.
        best = best._replace(rows=next(rows for rows in (16, 32, 64) if seq_q <= rows), warps=4)
    while best.rows * width * 2 + best.stages * best.keys * (4 * width + best.rows * mask) > shared:
        if best.stages > 2:
            best = best._replace(stages=best.stages - 1)
        elif best.keys > 32:
            best = best._replace(keys=best.keys // 2)
        elif best.rows > 64:
            best = best._replace(rows=best.rows // 2, warps=4)
        elif best.keys > 16:
            best = best._replace(keys=best.keys // 2)
        else:
            break
    return best


def _strides(tensor: Tensor, layout: str) -> tuple[int, int, int]:
    """How far apart batches, heads and tokens are. Of one batch or head that is 0, so that it is no further kind of call; of one
    token the width of a row, in whole loads."""
    head, token = (1, 2) if layout == "BHSD" else (2, 1)
    shape, stride = tensor.shape, tensor.stride()
    row = stride[token] if shape[token] > 1 else -(-shape[-1] // _LOAD) * _LOAD
    return stride[0] if shape[0] > 1 else 0, stride[head] if shape[head] > 1 else 0, row


def in_loads(*strides: int) -> tuple[int, ...]:
    """The same in loads of 16 bytes, so that Triton knows where rows begin. Where it has to read keys and values number by
    number, the code it makes of their products gives wrong results (3.6 on sm_90)."""
    return tuple(stride // _LOAD for stride in strides)


def is_loadable(tensor: Tensor) -> bool:
    """Whether its rows begin on multiples of 16 bytes."""
    apart = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    return aligned(tensor) and all(stride % _LOAD == 0 for stride, size in apart if size > 1)


def loadable(tensor: Tensor) -> Tensor:
    """A copy whose rows begin on multiples of 16 bytes."""
    width = tensor.shape[-1]
    room = tensor.new_empty((*tensor.shape[:-1], -(-width // _LOAD) * _LOAD))[..., :width]
    return room.copy_(tensor)


def strides_of_mask(mask: Tensor | None) -> tuple[int, int, int, int]:
    """How far apart the numbers of a mask are in batch, heads, queries and keys: 0 where it holds for all."""
    if mask is None:
        return 0, 0, 0, 0
    shape, stride = (1,) * (4 - mask.dim()) + tuple(mask.shape), (0,) * (4 - mask.dim()) + mask.stride()
    batch, head, row = (step if size > 1 else 0 for size, step in zip(shape[:3], stride[:3], strict=True))
    return batch, head, row, stride[3]


def factors_of(scale: float, softcap: float, added: bool) -> tuple[int, float, float, int]:
    """The sign of scores, what they are multiplied by before the cap, the cap, and which way of capping."""
    sign, size = (1 if scale > 0.0 else -1, abs(scale)) if abs(scale) >= _TINY else (0, 1.0)
    unit = 1.0 if added else _LOG2E
    if softcap == 0.0:
        return sign, size * unit, 0.0, _UNCAPPED
    if softcap <= _NEAR:
        return sign, 2.0 * _LOG2E * size / softcap, softcap * unit, _NEARLY
    return sign, size / softcap, softcap * unit, _WIDELY


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
    blocks: Blocks | None = None,
) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What a call like this one runs, with these blocks or the usual ones, and its tensors."""
    head, token = (1, 2) if layout == "BHSD" else (2, 1)
    batch, heads, seq_q, head_dim = query.shape[0], query.shape[head], query.shape[token], query.shape[3]
    kv_heads, seq_k, v_dim = key.shape[head], key.shape[token], value.shape[3]
    device, dtype, shape = query.device, query.dtype, (*query.shape[:-1], v_dim)
    # In a graph, the sequence comes first in memory, as in results of torch's own attention.
    turned = is_traced() and layout == "BHSD"
    if batch * heads * seq_q * v_dim * seq_k == 0:
        return lambda query: torch.zeros(shape, dtype=dtype, device=device), (query,)
    dim, v_width = power(max(head_dim, _NARROWEST)), power(max(v_dim, _NARROWEST))
    mask = _NONE if attn_mask is None else _BOOL if attn_mask.dtype == torch.bool else _ADDED
    # No window reaches further than from the first query to the last key.
    left, right = min(window_left, seq_q + seq_k), 0 if causal else min(window_right, seq_q + seq_k)
    mask_strides = strides_of_mask(attn_mask)
    each = attn_mask.element_size() if attn_mask is not None and mask_strides[2] else 0
    cut = blocks or blocks_for(max(dim, v_width), seq_q, each, shared_memory(device))
    sign, factor, cap, capping = factors_of(
        1.0 / math.sqrt(max(head_dim, 1)) if scale is None else float(scale), float(softcap), mask == _ADDED
    )
    # What cannot be loaded 16 bytes at a time is copied.
    operands = (query, key, value)
    copied = [not is_loadable(one) for one in operands]
    if is_traced() and any(copied):
        raise UntraceableError("rows of its tensors do not begin on multiples of 16 bytes")
    q, k, v = (loadable(one.to("meta")) if copy else one for one, copy in zip(operands, copied, strict=True))
    (*q_apart, q_token), (*k_apart, k_token), (*v_apart, v_token) = (_strides(one, layout) for one in (q, k, v))
    y_head, y_token = (seq_q * v_dim, v_dim) if layout == "BHSD" and not turned else (v_dim, heads * v_dim)
    y_batch = heads * seq_q * v_dim
    group = heads // kv_heads
    many = -(-seq_q // cut.rows)
    together = max(_SHARED_BYTES // (seq_k * (head_dim + v_dim) * query.element_size()), 1) * group
    together = min(together, batch * heads)
    launch = Launch(
        _attend,
        batch * heads * many,
        device,
        (
            *(batch * heads, heads, group, together, many, seq_q, seq_k, left, right, factor, cap),
            *(*in_loads(*q_apart, *k_apart, *v_apart), y_batch, y_head, *mask_strides),
        ),
        (
            *(q_token, k_token, v_token, y_token, head_dim, v_dim, cut.rows, cut.keys, cut.span),
            *(dim, v_width, sign, capping, mask, mask_strides[2] == 0, left >= 0, right >= 0),
        ),
        cut.warps,
        cut.stages,
    )

    def call(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
        output = torch.empty((batch, seq_q, heads, v_dim) if turned else shape, dtype=dtype, device=device)
        if any(copied):
            given = zip((query, key, value), copied, strict=True)
            query, key, value = (loadable(one) if copy else one for one, copy in given)
        launch(query, key, value, attn_mask, output)
        return output.transpose(1, 2) if turned else output

    return call, (query, key, value, attn_mask)


@planned
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Any:
    """Attention of many queries."""
    return plan(query, key, value, attn_mask, causal, scale, window_left, window_right, softcap, layout)


@planned
def cross(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    softcap: float,
    layout: str,
) -> Any:
    """The same, to another sequence."""
    return plan(query, key, value, attn_mask, False, scale, -1, -1, softcap, layout)


#: Under a mask they are kernels of their own, since that is where they outrank torch's before anything is measured.
KERNELS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((f"triton.attention{kind}" for kind in ("", ".gqa", ".masked", ".masked.gqa")), attention),
    **dict.fromkeys(("triton.attention.cross", "triton.attention.masked.cross"), cross),
}
