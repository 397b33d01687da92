"""Dense attention: one sequence by the kernel for a single one, several as sequences of one length. Packed sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import positive, tileable
from ..packed_rows import check_longest
from ..torch_functions.paged import check_segments
from .plans import plans
from .rows import Rows, rows_of

# The library's function and class, once it is found.
_single: Any = None
_Ragged: Any = None


def bind(library: Any) -> None:
    """Takes what is used out of the library."""
    global _single, _Ragged
    _single, _Ragged = library.single_prefill_with_kv_cache, library.BatchPrefillWithRaggedKVCacheWrapper


def single(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """One sequence, always given sequence first. The kernel for Hopper takes strides as `kv_layout` has them and sizes as
    if it were "NHD": for "HND" it divides by heads // keys, which ends the process, or attends to as many keys as there
    are heads."""
    query, scale = positive(query, scale)
    heads_first = layout == "BHSD"
    turned = (t[0].transpose(0, 1) if heads_first else t[0] for t in (query, key, value))
    output: Tensor = _single(
        *map(tileable, turned),
        causal=causal,
        kv_layout="NHD",
        sm_scale=scale,
        window_left=window_left,
        logits_soft_cap=softcap,
    )
    return (output.transpose(0, 1) if heads_first else output)[None]


def single_cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, layout: str) -> Tensor:
    """One sequence, to another."""
    return single(query, key, value, False, scale, -1, softcap, layout)


def ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    softcap: float,
) -> Tensor:
    """Several sequences, one after another in memory. The plan depends on sizes alone."""
    query, scale = positive(query, scale)
    (batch, seq_q, heads, head_dim), (_, seq_k, kv_heads, v_dim) = query.shape, value.shape
    sizes = (batch, seq_q, seq_k, heads, kv_heads, head_dim, v_dim)

    def plan(wrapper: Any) -> None:
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32) * seq_q,
            torch.arange(batch + 1, dtype=torch.int32) * seq_k,
            heads,
            kv_heads,
            head_dim,
            head_dim_vo=v_dim,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=softcap,
            sm_scale=scale,
            q_data_type=query.dtype,
            kv_data_type=key.dtype,
        )

    kind = ("ragged", sizes, query.dtype, causal, scale, window_left, softcap)
    planned = plans.get(kind, query.device, _Ragged, plan, ())
    packed = (tileable(tensor.flatten(0, 1)) for tensor in (query, key, value))
    output: Tensor = planned.wrapper.run(*packed)
    return output.view(batch, seq_q, heads, v_dim)


def ragged_cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float) -> Tensor:
    """Several sequences, to others."""
    return ragged(query, key, value, False, scale, -1, softcap)


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    softcap: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Packed sequences. The plan is made from their bounds."""
    rows, heads, head_dim = query.shape
    tokens, kv_heads, v_dim = value.shape
    query, scale = positive(query, scale)

    def plan(wrapper: Any) -> tuple[Rows, slice] | None:
        of_rows = check_segments("cu_seqlens_q", cu_seqlens_q, rows)
        of_keys = check_segments("cu_seqlens_k", cu_seqlens_k, tokens)
        lengths = [end - start for start, end in of_keys]
        check_longest("max_seqlen_q", max_seqlen_q, max(end - start for start, end in of_rows))
        check_longest("max_seqlen_k", max_seqlen_k, max(lengths))
        ends = [of_rows[0][0], *(end for _, end in of_rows)]
        computed = rows_of(ends, lengths, causal, query.device)
        if computed is None:
            return None
        # It is given the keys of sequences and no others.
        first = of_keys[0][0]
        wrapper.plan(
            torch.tensor(ends, dtype=torch.int32) - computed.first,
            torch.tensor([first, *(end for _, end in of_keys)], dtype=torch.int32) - first,
            heads,
            kv_heads,
            head_dim,
            head_dim_vo=v_dim,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=softcap,
            sm_scale=scale,
            q_data_type=query.dtype,
            kv_data_type=key.dtype,
        )
        return computed, slice(first, of_keys[-1][1])

    sizes = (rows, tokens, cu_seqlens_q.shape[0], heads, kv_heads, head_dim, v_dim)
    kind = ("varlen", sizes, query.dtype, causal, scale, window_left, softcap)
    bounds = (cu_seqlens_q, cu_seqlens_k)
    planned = plans.get(kind, query.device, _Ragged, plan, bounds, (max_seqlen_q, max_seqlen_k))
    if planned.found is None:
        return torch.zeros(rows, heads, v_dim, dtype=query.dtype, device=query.device)
    computed: Rows = planned.found[0]
    keys = planned.found[1]
    output: Tensor = planned.wrapper.run(tileable(computed.of(query)), tileable(key[keys]), tileable(value[keys]))
    return computed.whole(output, rows)


PREFILL: dict[str, Callable[..., Any]] = {
    "flashinfer.single_prefill": single,
    "flashinfer.single_prefill.cross": single_cross,
    "flashinfer.ragged_prefill": ragged,
    "flashinfer.ragged_prefill.varlen": packed,
    "flashinfer.ragged_prefill.cross": ragged_cross,
}
