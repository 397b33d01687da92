"""FlashAttention 4 (`flash_attn.cute`): dense attention and packed queries over pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..dense_attention import Call, dense
from ..library import Library
from ..operands import bshd, check_caches, loadable, positive, readable
from ..packed_rows import rows_of
from .launching import launch

library = Library("flash_attn.cute", "flash_attn_func", "flash_attn_varlen_func")


def _side(window: int) -> int | None:
    return None if window < 0 else window


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def operand(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in the library's order, and a copy of one that is expanded."""
    turned = bshd(tensor, layout)
    return turned.contiguous() if _is_expanded(turned) else turned


def single_launch(
    function: Callable[..., Any], operands: tuple[Tensor, ...], layout: str, **keywords: Any
) -> tuple[Any, ...] | None:
    """The whole call as one launch, where no argument has to be copied."""
    scale = keywords["softmax_scale"]
    if (scale is not None and scale <= 0.0) or not all(readable(t) and not _is_expanded(t) for t in operands):
        return None
    return launch(function, operands, layout == "BHSD", **keywords), operands


def _options(call: Call) -> dict[str, Any]:
    return {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": (_side(call.window_left), _side(call.window_right)),
        "softcap": call.softcap,
    }


def _whole(call: Call, **more: Any) -> tuple[Any, ...] | None:
    return single_launch(library.flash_attn_func, call.operands, call.layout, **_options(call), **more)


def _attend(call: Call, **more: Any) -> Tensor:
    output: Tensor = library.flash_attn_func(*call.operands, **_options(call), **more)[0]
    return output


_OPTIONS = ("causal", "window_left", "window_right", "softcap")
attention = dense(_attend, *_OPTIONS, operand=operand, whole=_whole)
# Each head by itself: the library would work on the heads of a group together.
unpacked = dense(partial(_attend, pack_gqa=False), *_OPTIONS, operand=operand, whole=partial(_whole, pack_gqa=False))
cross = dense(_attend, "softcap", operand=operand, whole=_whole)
# With gradients.
trained = dense(_attend, *_OPTIONS, operand=operand)
trained_cross = dense(_attend, "softcap", operand=operand)


def paged_prefill(
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
) -> Tensor:
    """Packed queries over pages."""
    rows = rows_of(cu_seqlens_q, query)
    query, scale = positive(query, scale)
    check_caches(key_cache, value_cache)
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    output: Tensor = library.flash_attn_varlen_func(
        loadable(query),
        key_cache,
        value_cache,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max(rows.longest, 1),
        max_seqlen_k=block_tables.shape[1] * key_cache.shape[1],
        seqused_k=context_lens,
        page_table=block_tables,
        softmax_scale=scale,
        causal=causal,
        window_size=(_side(window_left), None),
        softcap=softcap,
    )[0]
    return rows.zero_others(output)
