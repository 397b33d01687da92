"""Dense attention: one sequence by the kernel for a single one, several as sequences of one length."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import positive, tileable
from .plans import plans

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


PREFILL: dict[str, Callable[..., Any]] = {
    "flashinfer.single_prefill": single,
    "flashinfer.single_prefill.cross": single_cross,
    "flashinfer.ragged_prefill": ragged,
    "flashinfer.ragged_prefill.cross": ragged_cross,
}
