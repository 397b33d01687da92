"""FlashAttention 4 (`flash_attn.cute`): dense attention and packed queries over pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from layerzero.kernels import direct

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


def _whole_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
    **more: Any,
) -> tuple[Any, ...] | None:
    keywords = _keywords(causal, scale, window_left, window_right, softcap)
    return single_launch(library.flash_attn_func, (query, key, value), layout, **keywords, **more)


def _keywords(causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (_side(window_left), _side(window_right)),
        "softcap": softcap,
    }


def _attended(
    operands: tuple[Tensor, Tensor, Tensor], scale: float | None, layout: str, more: dict[str, Any]
) -> Tensor:
    query, scale = positive(operands[0], scale)
    turned = (operand(tensor, layout) for tensor in (query, *operands[1:]))
    output: Tensor = library.flash_attn_func(*turned, **{**more, "softmax_scale": scale})[0]
    return output.transpose(1, 2) if layout == "BHSD" else output


def trained(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Dense attention, with gradients."""
    keywords = _keywords(causal, scale, window_left, window_right, softcap)
    return _attended((query, key, value), scale, layout, keywords)


@direct(_whole_call)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Dense attention."""
    return trained(query, key, value, causal, scale, window_left, window_right, softcap, layout)


@direct(partial(_whole_call, pack_gqa=False))
def unpacked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Dense attention, each head by itself: the library would work on the heads of a group together."""
    keywords = {**_keywords(causal, scale, window_left, window_right, softcap), "pack_gqa": False}
    return _attended((query, key, value), scale, layout, keywords)


def _whole_cross(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, layout: str
) -> tuple[Any, ...] | None:
    return _whole_call(query, key, value, False, scale, -1, -1, softcap, layout)


def trained_cross(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, layout: str
) -> Tensor:
    """Attention to another sequence, with gradients."""
    return trained(query, key, value, False, scale, -1, -1, softcap, layout)


@direct(_whole_cross)
def cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, layout: str) -> Tensor:
    """Attention to another sequence."""
    return trained_cross(query, key, value, scale, softcap, layout)


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
