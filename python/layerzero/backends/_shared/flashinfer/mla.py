"""Latent attention, over a paged cache or over latent vectors that lie one after another: pages of one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import check_caches, loadable, positive
from ..torch_functions.paged import check_segments
from .paged import pages_of
from .plans import plans
from .rows import Rows, rows_of

# The library's class, once it is found.
_Latent: Any = None


def bind(library: Any) -> None:
    """Takes what is used out of the library."""
    global _Latent
    _Latent = library.mla.BatchMLAPagedAttentionWrapper


def _query(q_nope: Tensor, q_pe: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
    latent, positive_scale = positive(q_nope, scale)
    position, _ = positive(q_pe, scale)
    assert positive_scale is not None
    return latent, position, positive_scale


def paged(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """One query per sequence over pages."""
    return _paged(q_nope, q_pe, ckv_cache, kpe_cache, block_tables, context_lens, None, scale, False)


def paged_packed(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    qo_indptr: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """Several queries per sequence over pages."""
    return _paged(q_nope, q_pe, ckv_cache, kpe_cache, block_tables, context_lens, qo_indptr, scale, causal)


def _paged(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    qo_indptr: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    check_caches(ckv_cache, kpe_cache)
    (num_blocks, block_size, dim_ckv), dim_kpe = ckv_cache.shape, kpe_cache.shape[-1]
    rows, heads = q_nope.shape[:2]
    q_nope, q_pe, scale = _query(q_nope, q_pe, scale)
    tensors = (block_tables, context_lens) if qo_indptr is None else (block_tables, context_lens, qo_indptr)

    def plan(wrapper: Any) -> Rows | None:
        pages = pages_of(block_tables, context_lens, block_size, num_blocks)
        ends = list(range(rows + 1))
        if qo_indptr is not None:
            segments = check_segments("qo_indptr", qo_indptr, rows)
            ends = [segments[0][0], *(end for _, end in segments)]
        computed = rows_of(ends, pages.lengths, causal, q_nope.device)
        if computed is not None:
            wrapper.plan(
                torch.tensor(ends, dtype=torch.int32) - computed.first,
                pages.indptr,
                pages.indices,
                torch.tensor(pages.lengths, dtype=torch.int32),
                heads,
                dim_ckv,
                dim_kpe,
                block_size,
                causal,
                scale,
                q_nope.dtype,
                ckv_cache.dtype,
            )
        return computed

    sizes = (rows, context_lens.shape[0], heads, dim_ckv, dim_kpe, block_size, num_blocks)
    kind = ("mla.paged", sizes, q_nope.dtype, scale, causal)
    planned = plans.get(kind, q_nope.device, _Latent, plan, tensors)
    if planned.found is None:
        return torch.zeros_like(q_nope)
    computed: Rows = planned.found
    output = planned.wrapper.run(loadable(computed.of(q_nope)), loadable(computed.of(q_pe)), ckv_cache, kpe_cache)
    return computed.whole(output, rows)


def packed(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """Packed queries over packed latent vectors."""
    rows, heads, dim_ckv = q_nope.shape
    tokens, dim_kpe = ckv.shape[0], kpe.shape[-1]
    q_nope, q_pe, scale = _query(q_nope, q_pe, scale)
    tensors = () if qo_indptr is None or kv_indptr is None else (qo_indptr, kv_indptr)

    def plan(wrapper: Any) -> Rows | None:
        ends, starts, lengths = [0, rows], [0, tokens], [tokens]
        if tensors:
            of_keys = check_segments("kv_indptr", tensors[1], tokens)
            of_rows = check_segments("qo_indptr", tensors[0], rows)
            ends = [of_rows[0][0], *(end for _, end in of_rows)]
            starts = [of_keys[0][0], *(end for _, end in of_keys)]
            lengths = [end - start for start, end in of_keys]
        computed = rows_of(ends, lengths, causal, q_nope.device)
        if computed is not None:
            wrapper.plan(
                torch.tensor(ends, dtype=torch.int32) - computed.first,
                torch.tensor(starts, dtype=torch.int32),
                torch.arange(tokens, dtype=torch.int32, device=q_nope.device),
                torch.tensor(lengths, dtype=torch.int32),
                heads,
                dim_ckv,
                dim_kpe,
                1,
                causal,
                scale,
                q_nope.dtype,
                ckv.dtype,
            )
        return computed

    kind = ("mla", (rows, tokens, heads, dim_ckv, dim_kpe), q_nope.dtype, scale, causal)
    planned = plans.get(kind, q_nope.device, _Latent, plan, tensors)
    if planned.found is None:
        return torch.zeros_like(q_nope)
    computed: Rows = planned.found
    latent, position = (loadable(tensor.view(tokens, 1, tensor.shape[-1])) for tensor in (ckv, kpe))
    output = planned.wrapper.run(loadable(computed.of(q_nope)), loadable(computed.of(q_pe)), latent, position)
    return computed.whole(output, rows)


KERNELS: dict[str, Callable[..., Any]] = {"flashinfer.mla.decode.paged": paged}
PREFILL: dict[str, Callable[..., Any]] = {
    "flashinfer.mla.prefill": packed,
    "flashinfer.mla.decode": packed,
    "flashinfer.mla.prefill.paged": paged_packed,
}
