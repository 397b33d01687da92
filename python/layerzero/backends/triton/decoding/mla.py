# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Latent attention of one new query per sequence over a paged latent cache.

All heads share the one latent head: they are the rows of a product, some of them to a block of threads. A tile of latent
vectors is read once, as keys and as values.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import INTERPRETED, Launch, planned, power
from ..overlapping import go_on, overlaps
from . import splitting
from .paged import reach
from .pages import known, look_up, slots_of
from .splitting import give, weigh


@triton.jit(do_not_specialize=["capacity", "parts", "lines", "heads", "blocks", "num_blocks"])
def _attend(
    n_ptr, p_ptr, ckv_ptr, kpe_ptr, tables_ptr, lens_ptr, y_ptr,
    heads, blocks, dim_ckv, dim_kpe, capacity, parts, lines, num_blocks, scale,
    n_batch, n_head, p_batch, p_head, ckv_page, kpe_page, t_batch, t_page, l_batch,
    CKV_SLOT: tl.constexpr, KPE_SLOT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    CKV: tl.constexpr, KPE: tl.constexpr, SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    go_on(OVERLAPS)
    # Neighbours read the same.
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks % parts
    batch = (tl.program_id(0) // blocks // parts).to(tl.int64)
    head = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ckv_column, kpe_column, tile = tl.arange(0, CKV), tl.arange(0, KPE), tl.arange(0, TOKENS)
    in_ckv, in_kpe = (ckv_column < dim_ckv)[None, :], (kpe_column < dim_kpe)[None, :]
    some = head < heads
    _, start, end, sound = reach(lens_ptr, batch * l_batch, capacity, 0, part, parts, TOKENS, False)
    tables_ptr += batch * t_batch
    sound = sound & known(tables_ptr, start, end, num_blocks, t_page, PAGE)

    n_at = n_ptr + batch * n_batch + head[:, None] * n_head + ckv_column[None, :]
    p_at = p_ptr + batch * p_batch + head[:, None] * p_head + kpe_column[None, :]
    q_nope = tl.load(n_at, mask=some[:, None] & in_ckv, other=0.0)
    q_pe = tl.load(p_at, mask=some[:, None] & in_kpe, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, CKV], tl.float32)
    page = look_up(tables_ptr, start, tile, end, num_blocks, t_page, TOKENS, PAGE)
    for begin in range(start, end, TOKENS):
        there = begin + tile < end
        slot = slots_of(begin, tile, TOKENS, PAGE).to(tl.int64)
        ckv_at = ckv_ptr + (page * ckv_page + slot * CKV_SLOT)[:, None] + ckv_column[None, :]
        kpe_at = kpe_ptr + (page * kpe_page + slot * KPE_SLOT)[:, None] + kpe_column[None, :]
        ckv = tl.load(ckv_at, mask=there[:, None] & in_ckv, other=0.0).to(q_nope.dtype)
        kpe = tl.load(kpe_at, mask=there[:, None] & in_kpe, other=0.0).to(q_nope.dtype)
        scores = tl.dot(q_nope, tl.trans(ckv))
        scores = tl.dot(q_pe, tl.trans(kpe), scores)
        weights, kept, top, total = weigh(scores, there[None, :], top, total, scale, 0.0, False)
        y = tl.dot(weights.to(q_nope.dtype), ckv, y * kept[:, None])
        # Looked up here, and not where it is used, it leaves all stages of the pipeline to latent vectors.
        page = look_up(tables_ptr, begin + TOKENS, tile, end, num_blocks, t_page, TOKENS, PAGE)
    give(y_ptr, y, top, total, batch * heads + head, some, sound, dim_ckv, parts, part, lines, CKV, SPLIT)


def _tiling(heads: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Rows and tokens of a tile, warps, stages, and how many blocks of threads a multiprocessor holds.

    Hopper multiplies 64 rows at a time out of shared memory; elsewhere, and for few heads, 16 are held in registers.
    """
    if heads > 16 and not INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0):
        return 64, 64, 8, 2, 1
    return 16, 32, 4, 3, 2


@planned
def decode(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Any:
    """One query per sequence over a paged cache."""
    batch, heads, dim_ckv = q_nope.shape
    if q_nope.numel() == 0:
        return torch.zeros_like, (q_nope,)
    device, block_size = q_nope.device, ckv_cache.shape[1]
    rows, tokens, warps, stages, resident = _tiling(heads, device)
    blocks, ckv, kpe = -(-heads // rows), power(max(dim_ckv, 16)), power(max(q_pe.shape[2], 16))
    capacity = block_tables.shape[1] * block_size
    tile = tokens * (ckv + kpe) * ckv_cache.element_size()
    parts = splitting.parts_for(
        batch * blocks, -(-capacity // tokens), device, resident, 8 * min(rows, heads) * dim_ckv / tile
    )
    scalars = (
        *(heads, blocks, dim_ckv, q_pe.shape[2], capacity, parts, batch * heads * parts, ckv_cache.shape[0]),
        *(splitting.factors(float(scale), 0.0)[0], q_nope.stride(0), q_nope.stride(1), q_pe.stride(0), q_pe.stride(1)),
        *(ckv_cache.stride(0), kpe_cache.stride(0), *block_tables.stride(), context_lens.stride(0)),
    )
    constants = (
        *(ckv_cache.stride(1), kpe_cache.stride(1), block_size, rows, tokens, ckv, kpe),
        *(parts > 1, parts > 1 and overlaps(device)),
    )
    attend = Launch(_attend, batch * blocks * parts, device, scalars, constants, warps, stages)
    tensors = (q_nope, q_pe, ckv_cache, kpe_cache, block_tables, context_lens)
    return splitting.attention(attend, q_nope, dim_ckv, parts), tensors


KERNELS: dict[str, Callable[..., Any]] = {"triton.mla.decode.paged": decode}
